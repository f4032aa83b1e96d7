//! Malformed bytes: each yields a typed error that names its field, within bounded memory.

use bytes::Bytes;
use prost::Message;
use tinkex_wire::{
    Datum, DecodeError, DecodeErrorKind as Kind, ForwardBackward, ForwardBackwardOutput,
    LossConfig, LossFn, LossRecord, SampleResponse, SampledSequence, SessionHeartbeat, TensorData,
    Tokens,
};

use crate::messages as peer;

const FLOAT32: i32 = 1;
const INT64: i32 = 2;

/// Encodes 64-bit integers as little-endian bytes.
fn longs(numbers: &[i64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Decodes a training request that prost encoded. Returns the kind and the path of the error.
fn request(request: &peer::ForwardBackwardRequest) -> (Kind, String) {
    error_of(ForwardBackward::from_proto(&request.encode_to_vec().into()))
}

fn error_of<T: std::fmt::Debug>(result: Result<T, DecodeError>) -> (Kind, String) {
    let error = result.unwrap_err();
    (error.kind(), error.path().to_owned())
}

fn with_tensor(tensor: peer::Tensor) -> peer::ForwardBackwardRequest {
    let datum = peer::Datum {
        loss_fn_inputs: [("weights".to_owned(), tensor)].into(),
        ..Default::default()
    };
    // Append it to a valid datum, so that the index in the path is 1.
    peer::ForwardBackwardRequest { data: vec![peer::Datum::default(), datum], ..Default::default() }
}

fn dense(bytes: Vec<u8>, dtype: i32, shape: &[i64]) -> peer::Tensor {
    peer::Tensor { encoding: Some(peer::Encoding::Dense(bytes)), dtype, shape: shape.to_vec() }
}

#[test]
fn inconsistent_dense_tensors_are_rejected() {
    const AT: &str = "data[1].loss_fn_inputs[\"weights\"]";
    for (tensor, kind, field) in [
        (dense(vec![0; 4], 0, &[1]), Kind::DType, "dtype"),
        (dense(vec![0; 4], 9, &[1]), Kind::DType, "dtype"),
        (dense(vec![0; 5], FLOAT32, &[]), Kind::Length, "dense"),
        (dense(vec![0; 8], FLOAT32, &[3]), Kind::Length, "dense"),
        (dense(vec![0; 8], INT64, &[2]), Kind::Length, "dense"),
        (dense(vec![0; 8], FLOAT32, &[-2]), Kind::Shape, "shape"),
        (dense(vec![0; 8], FLOAT32, &[i64::MAX, i64::MAX]), Kind::Shape, "shape"),
        (dense(vec![], FLOAT32, &[1 << 62, 4]), Kind::Shape, "shape"),
        (peer::Tensor { dtype: 1, ..Default::default() }, Kind::Missing, "dense"),
    ] {
        let about = format!("{tensor:?}");
        assert_eq!(request(&with_tensor(tensor)), (kind, format!("{AT}.{field}")), "{about}");
    }
}

#[test]
fn inconsistent_sparse_tensors_are_rejected() {
    const AT: &str = "data[1].loss_fn_inputs[\"weights\"]";
    let good = [0, 1, 3];
    for (rows, columns, shape, kind, field) in [
        (&good[..], &[0, 1, 2][..], &[2, 3, 1][..], Kind::Shape, "shape"),
        (&good, &[0, 1, 2], &[], Kind::Shape, "shape"),
        (&good, &[0, 1, 2], &[2, i64::MAX], Kind::Shape, "shape"),
        (&good, &[0, 1, 2], &[3, 3], Kind::Offsets, "sparse_csr.crow_indices"),
        (&[1, 1, 3], &[0, 1, 2], &[2, 3], Kind::Offsets, "sparse_csr.crow_indices"),
        (&[0, 2, 1], &[0, 1, 2], &[2, 3], Kind::Offsets, "sparse_csr.crow_indices"),
        (&[0, 1, 4], &[0, 1, 2], &[2, 3], Kind::Offsets, "sparse_csr.crow_indices"),
        (&[0, -1, 3], &[0, 1, 2], &[2, 3], Kind::Offsets, "sparse_csr.crow_indices"),
        (&good, &[0, 1], &[2, 3], Kind::Index, "sparse_csr.col_indices"),
        (&good, &[0, 1, 3], &[2, 3], Kind::Index, "sparse_csr.col_indices"),
        (&good, &[0, -1, 2], &[2, 3], Kind::Index, "sparse_csr.col_indices"),
    ] {
        let csr = peer::SparseCsr {
            values: vec![0; 12],
            crow_indices: longs(rows),
            col_indices: longs(columns),
        };
        let tensor = peer::Tensor {
            encoding: Some(peer::Encoding::SparseCsr(csr)),
            dtype: FLOAT32,
            shape: shape.to_vec(),
        };
        let about = format!("{rows:?} {columns:?} {shape:?}");
        assert_eq!(request(&with_tensor(tensor)), (kind, format!("{AT}.{field}")), "{about}");
    }
}

#[test]
fn inconsistent_requests_are_rejected() {
    let negative_seq_id = peer::ForwardBackwardRequest { seq_id: -1, ..Default::default() };
    assert_eq!(request(&negative_seq_id), (Kind::Number, "seq_id".to_owned()));

    let model_input = vec![peer::Chunk { chunk: None }];
    let data = vec![peer::Datum { model_input, ..Default::default() }];
    let empty_chunk = peer::ForwardBackwardRequest { data, ..Default::default() };
    assert_eq!(request(&empty_chunk), (Kind::Missing, "data[0].model_input[0]".to_owned()));

    let image = |format: &str| peer::ForwardBackwardRequest {
        data: vec![peer::Datum {
            model_input: vec![peer::Chunk {
                chunk: Some(peer::ChunkKind::Image(peer::ImageChunk {
                    format: format.to_owned(),
                    ..Default::default()
                })),
            }],
            ..Default::default()
        }],
        ..Default::default()
    };
    let path = "data[0].model_input[0].image.format".to_owned();
    assert_eq!(request(&image("gif")), (Kind::Value, path.clone()));
    assert_eq!(request(&image("")), (Kind::Missing, path));

    let one_list_of_spans = peer::ForwardBackwardRequest {
        data: vec![peer::Datum {
            model_input_spans: vec![peer::ProvenanceSpan {
                span: Some(peer::SpanSource::PromptTokens(peer::SpanRange::default())),
            }],
            ..Default::default()
        }],
        ..Default::default()
    };
    let found = request(&one_list_of_spans);
    assert_eq!(found, (Kind::Missing, "data[0].loss_fn_input_spans".to_owned()));

    let settings = (0..1000).map(|i| (format!("s{i}"), 1.0)).collect();
    let many_settings =
        peer::ForwardBackwardRequest { loss_fn_config: settings, ..Default::default() };
    assert_eq!(request(&many_settings), (Kind::TooLarge, "loss_fn_config".to_owned()));
}

#[test]
fn malformed_fields_are_named() {
    let read =
        |bytes: &'static [u8]| error_of(ForwardBackward::from_proto(&Bytes::from_static(bytes)));
    for (bytes, kind, path) in [
        (&b"\x0a\x05ab"[..], Kind::Truncated, "model_id"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", Kind::Truncated, "model_id"),
        (b"\x0a\x02\xc3\x28", Kind::Utf8, "model_id"),
        (b"\x08\x01", Kind::Tag, "model_id"),
        (b"\x12\x01x", Kind::Tag, "seq_id"),
        (b"\x0b", Kind::Tag, "model_id"),
        (b"\x00\x01", Kind::Tag, ""),
        (b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", Kind::Varint, "seq_id"),
        (b"\xff", Kind::Truncated, ""),
        (b"\x1a\x04\x0a\x02\x0a\x05", Kind::Truncated, "data[0].model_input[0].encoded_text"),
        (
            b"\x1a\x07\x0a\x05\x0a\x03\x0a\x01x",
            Kind::Length,
            "data[0].model_input[0].encoded_text.tokens",
        ),
    ] {
        assert_eq!(read(bytes), (kind, path.to_owned()), "{bytes:x?}");
    }
    // Unknown fields of every wire type are ignored.
    let unknown = b"\xf8\x01\x05\xf9\x0112345678\xfa\x01\x01x\xfd\x011234\x10\x07";
    let request = ForwardBackward::from_proto(&Bytes::from_static(unknown)).unwrap();
    assert_eq!(request.seq_id.unwrap().get(), 7);
}

fn batched(data: usize, offsets: &[i64], dtype: i32, trailing: &[i64]) -> peer::BatchedTensor {
    peer::BatchedTensor {
        data: vec![0; data],
        offsets: longs(offsets),
        dtype,
        trailing_shape: trailing.to_vec(),
    }
}

fn output(
    tensor: peer::BatchedTensor,
    num_datums: i64,
) -> Result<ForwardBackwardOutput, DecodeError> {
    let record = peer::ArrayRecord {
        fields: [("x".to_owned(), tensor)].into(),
        num_datums,
        ..Default::default()
    };
    let message =
        peer::ForwardBackwardOutput { loss_fn_outputs: vec![record], ..Default::default() };
    ForwardBackwardOutput::from_proto(&message.encode_to_vec())
}

#[test]
fn inconsistent_results_are_rejected() {
    const AT: &str = "loss_fn_outputs[0].fields[\"x\"]";
    for (tensor, datums, kind, field) in [
        (batched(8, &[4, 8], FLOAT32, &[]), 1, Kind::Offsets, "offsets"),
        (batched(8, &[0, 8, 4], FLOAT32, &[]), 2, Kind::Offsets, "offsets"),
        (batched(8, &[0, 12], FLOAT32, &[]), 1, Kind::Offsets, "offsets"),
        (batched(8, &[0, 6, 8], FLOAT32, &[]), 2, Kind::Offsets, "offsets"),
        (batched(8, &[0, -4, 8], FLOAT32, &[]), 2, Kind::Offsets, "offsets"),
        (batched(8, &[0, 8], FLOAT32, &[]), 2, Kind::Offsets, "offsets"),
        (batched(9, &[0, 8], FLOAT32, &[]), 1, Kind::Length, "data"),
        (batched(8, &[0, 8], 0, &[]), 1, Kind::DType, "dtype"),
        (batched(8, &[0, 8], FLOAT32, &[3]), 1, Kind::Shape, "trailing_shape"),
        (batched(8, &[0, 8], FLOAT32, &[0]), 1, Kind::Shape, "trailing_shape"),
        (batched(0, &[0, 0], FLOAT32, &[i64::MAX, 3]), 1, Kind::Shape, "trailing_shape"),
        (batched(8, &[0, 8], FLOAT32, &[-1]), 1, Kind::Shape, "trailing_shape"),
    ] {
        let about = format!("{tensor:?}");
        assert_eq!(error_of(output(tensor, datums)), (kind, format!("{AT}.{field}")), "{about}");
    }
    let odd = peer::BatchedTensor { offsets: vec![0; 9], dtype: FLOAT32, ..Default::default() };
    assert_eq!(error_of(output(odd, 0)), (Kind::Length, format!("{AT}.offsets")));
}

#[test]
fn datum_counts_are_derived_from_fields_if_not_declared() {
    // Without declared counts, the fields determine them.
    let read = output(batched(12, &[0, 4, 12], FLOAT32, &[]), 0).unwrap();
    assert_eq!(read.loss_fn_outputs.len(), 2);
    // A declared count without fields yields empty datums.
    let bare = |num_datums| {
        let record = peer::ArrayRecord { num_datums, ..Default::default() };
        let message =
            peer::ForwardBackwardOutput { loss_fn_outputs: vec![record], ..Default::default() };
        ForwardBackwardOutput::from_proto(&message.encode_to_vec())
    };
    let outputs = bare(3).unwrap().loss_fn_outputs;
    assert_eq!((outputs.len(), outputs.get(2).unwrap().names().len()), (3, 0));
    assert_eq!(error_of(bare(i64::MAX)), (Kind::TooLarge, "loss_fn_outputs[0]".to_owned()));
    assert_eq!(error_of(bare(-1)), (Kind::Number, "loss_fn_outputs[0].num_datums".to_owned()));
    // Neither a count nor fields.
    let empty = ForwardBackwardOutput::from_proto(b"").unwrap();
    assert_eq!(empty, ForwardBackwardOutput::default());
    assert_eq!(empty.loss_fn_output_type, "ArrayRecord");
}

#[test]
fn narrow_element_types_are_widened_everywhere() {
    let halves = peer::BatchedTensor {
        data: vec![0x80, 0x3F, 0x00, 0xC0],
        offsets: longs(&[0, 2, 4]),
        dtype: 4,
        trailing_shape: vec![],
    };
    let read = output(halves, 2).unwrap();
    assert_eq!(read.loss_fn_outputs.get(0).unwrap().f32("x"), Some(&[1.0][..]));
    assert_eq!(read.loss_fn_outputs.get(1).unwrap().f32("x"), Some(&[-2.0][..]));

    let tensor = |bytes: Vec<u8>, dtype| peer::SampleResponse {
        target_prompt_logprobs: Some(dense(bytes, dtype, &[1, 1])),
        ..Default::default()
    };
    let read = |message: peer::SampleResponse| {
        SampleResponse::from_proto(&message.encode_to_vec())
            .unwrap()
            .target_prompt_logprobs
            .unwrap()
    };
    assert_eq!(read(tensor(vec![0x80, 0x3F], 4)).as_f32(), Some(&[1.0][..]));
    assert_eq!(read(tensor(vec![0xFE, 0xFF, 0xFF, 0xFF], 3)).as_i64(), Some(&[-2][..]));
}

#[test]
fn inconsistent_samples_are_rejected() {
    let response = |sequence: peer::SampledSequence| {
        let message = peer::SampleResponse { sequences: vec![sequence], ..Default::default() };
        SampleResponse::from_proto(&message.encode_to_vec())
    };
    let topk = |cells: usize, k, length| peer::SampledSequence {
        topk_sampled_logprobs: Some(peer::TopkLogprobs {
            token_ids: vec![0; cells * 4],
            logprobs: vec![0; cells * 4],
            k,
            length,
        }),
        ..Default::default()
    };
    let path = |field: &str| format!("sequences[0].{field}");
    let odd = peer::SampledSequence { tokens: vec![0; 3], ..Default::default() };
    assert_eq!(error_of(response(odd)), (Kind::Length, path("tokens")));
    let short = peer::SampledSequence {
        tokens: vec![0; 8],
        logprobs: Some(vec![0; 4]),
        ..Default::default()
    };
    assert_eq!(error_of(response(short)), (Kind::Length, path("logprobs")));
    let wrong = error_of(response(topk(6, 2, 2)));
    assert_eq!(wrong, (Kind::Length, path("topk_sampled_logprobs.token_ids")));
    let huge = error_of(response(topk(0, u32::MAX, u32::MAX)));
    assert_eq!(huge, (Kind::Length, path("topk_sampled_logprobs.token_ids")));
    assert_eq!(response(topk(0, 0, 5)).unwrap().sequences[0].topk_logprobs, None);

    let alt = peer::SampleResponse {
        prompt_alt_tokens: Some(peer::PromptAltTokens {
            tokens: Some(dense(vec![0; 4], FLOAT32, &[1, 1])),
            logprobs: Some(dense(vec![0; 4], FLOAT32, &[1, 1])),
        }),
        ..Default::default()
    };
    let read = SampleResponse::from_proto(&alt.encode_to_vec());
    assert_eq!(error_of(read), (Kind::DType, "prompt_alt_tokens".to_owned()));
}

#[test]
fn encoding_allocates_one_buffer_of_the_exact_size() {
    let prompt = Tokens::from((0..300).collect::<Vec<u32>>());
    let rollout = |n: u32| {
        let completion: Vec<u32> = (0..n).collect();
        Datum::rollout(&prompt, completion, vec![-0.5; n as usize], 1.0).unwrap()
    };
    let request = ForwardBackward::new("m", (1..40).map(rollout).collect(), LossFn::Dro)
        .loss_fn_config(LossConfig::new().set("beta", 0.05).set("note", "x"));
    let mut body = Bytes::new();
    let used = allocation_counter::measure(|| body = request.to_proto().unwrap());
    assert_eq!((used.count_total, used.bytes_total), (1, body.len() as u64));

    let record = LossRecord::new(3).field("logprobs", vec![0.5_f32; 60], [10, 20, 30]).unwrap();
    let output = ForwardBackwardOutput::default().loss_fn_outputs(record);
    let used = allocation_counter::measure(|| body = output.to_proto());
    assert_eq!((used.count_total, used.bytes_total), (1, body.len() as u64));

    let sequence =
        SampledSequence::default().tokens(prompt.clone()).logprobs(Some(vec![-1.0; 300].into()));
    let response = SampleResponse::default().sequences(vec![sequence; 9]);
    let used = allocation_counter::measure(|| body = response.to_proto());
    assert_eq!((used.count_total, used.bytes_total), (1, body.len() as u64));
}

/// Expects one allocation per array and per list of them, and none for names, types, shapes and
/// reference counts.
#[test]
fn decoding_allocates_only_arrays_and_lists() {
    let rollout = |n: u32| {
        let completion: Vec<u32> = (0..n).collect();
        let targets = TensorData::from_rows(&vec![[1_i64, 0, 0, 0, 0, 0, 0, 0]; 300]).unwrap();
        let datum = Datum::rollout(vec![7; 300], completion, vec![-0.5; n as usize], 1.0).unwrap();
        let sparse = Datum::builder(vec![7_u32; 300])
            .loss_input("target_tokens", targets)
            .loss_input("weights", vec![1.0_f32; 300])
            .build()
            .unwrap();
        assert!(sparse.loss_input("target_tokens").unwrap().is_sparse());
        [datum, sparse]
    };
    let data: Vec<Datum> = (2..22).flat_map(rollout).collect();
    let request = ForwardBackward::new("m", data, LossFn::Ppo);
    let body = request.to_proto().unwrap();
    let mut read = None;
    let used = allocation_counter::measure(|| read = Some(ForwardBackward::from_proto(&body)));
    assert_eq!(read.unwrap().unwrap(), request);
    // First datum: prompt, completion, targets, log-probabilities and advantages, in two lists.
    // Second datum: prompt, weights, and a sparse matrix of three arrays in a box.
    let dense = 5 + 2;
    let sparse = 1 + 1 + 4 + 2;
    // Plus the list of datums and the model id.
    assert_eq!(used.count_total, 20 * (dense + sparse) + 2, "{used:?}");

    let sequence =
        SampledSequence::default().tokens(vec![3_u32; 300]).logprobs(Some(vec![-1.0; 300].into()));
    let response = SampleResponse::default().sequences(vec![sequence; 9]);
    let body = response.to_proto();
    let used = allocation_counter::measure(|| {
        assert_eq!(SampleResponse::from_proto(&body).unwrap(), response);
    });
    assert_eq!(used.count_total, 9 * 2 + 1, "{used:?}");
}

#[test]
fn error_messages_have_a_bounded_length() {
    let long = "x".repeat(1 << 20);
    let body = format!("{{\"session_id\":{{\"{long}\":1}}}}");
    let error = tinkex_wire::codec::json::decode::<SessionHeartbeat>(body.as_bytes()).unwrap_err();
    assert!(error.to_string().len() < 1000, "{} bytes", error.to_string().len());
    let tensor = peer::Tensor { dtype: 1, ..Default::default() };
    let datum = peer::Datum { loss_fn_inputs: [(long, tensor)].into(), ..Default::default() };
    let message = peer::ForwardBackwardRequest { data: vec![datum], ..Default::default() };
    let error = ForwardBackward::from_proto(&message.encode_to_vec().into()).unwrap_err();
    assert!(error.to_string().len() < 1000, "{} bytes", error.to_string().len());
}

/// Many tiny parts are the worst case: each has a struct of its own.
#[test]
fn memory_use_is_proportional_to_the_input() {
    let many = |part: &[u8]| Bytes::from(part.repeat(20_000));
    for part in [
        &b"\x1a\x00"[..],                    // an empty datum
        b"\x1a\x06\x0a\x04\x0a\x02\x0a\x00", // a datum of one empty chunk
        b"\x0a\x00",
        b"\x2a\x00",
    ] {
        let body = many(part);
        let peak = allocation_counter::measure(|| {
            let _ = ForwardBackward::from_proto(&body);
        });
        assert!(peak.bytes_max < body.len() as u64 * 96, "{part:x?}: {peak:?}");
    }
    for part in [&b"\x0a\x00"[..], b"\x12\x00", b"\x1a\x00"] {
        let body = many(part);
        let peak = allocation_counter::measure(|| {
            let _ = SampleResponse::from_proto(&body);
            let _ = ForwardBackwardOutput::from_proto(&body);
        });
        assert!(peak.bytes_max < body.len() as u64 * 96, "{part:x?}: {peak:?}");
    }
    // One long row and many empty ones.
    let row = vec!["[1,-1.0]"; 63].join(",");
    let nulls = "null,".repeat(100_000);
    let body =
        format!("{{\"sequences\":[],\"topk_prompt_logprobs\":[{nulls}[{row}]]}}").into_bytes();
    let peak = allocation_counter::measure(|| {
        let read = tinkex_wire::codec::json::decode::<SampleResponse>(&body).unwrap();
        assert_eq!(read.topk_prompt_logprobs.unwrap().row(100_000).unwrap().len(), 63);
    });
    assert!(peak.bytes_max < body.len() as u64 * 96, "{peak:?}");
}

#[test]
fn extreme_arguments_do_not_panic() {
    use tinkex_wire::{LossOutputs, TopkLogprobs};
    let topk = TopkLogprobs::from_rows([Some(vec![(1, -1.0)])]);
    assert!(topk.row(usize::MAX).is_none());
    let empty = TensorData::from(Vec::<f32>::new()).reshape([usize::MAX, 0]).unwrap();
    assert_eq!(empty.clone().compact(), empty);
    let wide = TensorData::sparse(vec![1_i64], vec![0, 1], vec![0], [1, 1 << 40]).unwrap();
    assert_eq!(wide.to_dense(1 << 20).unwrap_err().field(), "shape");
    assert!(LossRecord::new(usize::MAX).field("x", vec![1.0_f32], [1]).is_err());
    assert_eq!(LossOutputs::from(LossRecord::new(usize::MAX)).len(), usize::MAX);
    let twice = LossRecord::new(1).field("x", vec![1.0_f32], [1]).unwrap();
    let twice = twice.field("x", vec![2.0_f32], [1]).unwrap();
    assert_eq!(LossOutputs::from(twice).get(0).unwrap().f32("x"), Some(&[2.0][..]));
}
