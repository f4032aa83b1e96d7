//! Round-trip properties: encoding and decoding with protobuf, prost, JSON and text preserve
//! values.

use bytes::Bytes;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use prost::Message;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tinkex_wire::*;

use crate::messages as peer;

/// Any bit pattern, including infinities and NaNs.
fn any_f32() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits)
}

/// Values that JSON can represent: finite numbers, and NaN as null.
fn json_f32() -> impl Strategy<Value = f32> {
    prop_oneof![9 => any::<f32>().prop_filter("finite", |x| x.is_finite()), 1 => Just(f32::NAN)]
}

fn dense(number: impl Strategy<Value = f32> + 'static) -> impl Strategy<Value = TensorData> {
    let number = number.boxed();
    vec(0_usize..5, 0..4).prop_flat_map(move |dims| {
        let cells: usize = dims.iter().product();
        let shaped = move |values: TensorValues| {
            let dims = dims.clone();
            TensorData::new(values, &dims[..]).unwrap()
        };
        let other = shaped.clone();
        prop_oneof![
            vec(number.clone(), cells).prop_map(move |x| shaped(TensorValues::Float32(x.into()))),
            vec(any::<i64>(), cells).prop_map(move |x| other(TensorValues::Int64(x.into()))),
        ]
    })
}

fn sparse() -> impl Strategy<Value = TensorData> {
    (0_usize..5, 1_usize..6).prop_flat_map(|(rows, width)| {
        vec(vec(0..width as i64, 0..4), rows).prop_flat_map(move |columns| {
            let listed: usize = columns.iter().map(Vec::len).sum();
            (Just(columns), vec(any::<i64>(), listed), any::<bool>()).prop_map(
                move |(columns, values, float)| {
                    let mut starts = vec![0_i64];
                    for row in &columns {
                        starts.push(starts.last().unwrap() + row.len() as i64);
                    }
                    let columns = columns.concat();
                    let shape = [rows, width];
                    if float {
                        let floats: Vec<f64> = values.iter().map(|x| *x as f64).collect();
                        TensorData::sparse(floats, starts, columns, shape).unwrap()
                    } else {
                        TensorData::sparse(values, starts, columns, shape).unwrap()
                    }
                },
            )
        })
    })
}

fn tensor() -> impl Strategy<Value = TensorData> {
    // Protobuf does not distinguish a scalar from an unspecified shape.
    let stated = |tensor: &TensorData| *tensor.shape() != Shape::SCALAR;
    prop_oneof![dense(any_f32()).prop_filter("not a scalar", stated), sparse()]
}

fn format() -> impl Strategy<Value = ImageFormat> {
    prop_oneof![Just(ImageFormat::Png), Just(ImageFormat::Jpeg)]
}

/// A chunk that a training request can contain.
fn training_chunk() -> impl Strategy<Value = InputChunk> {
    let bytes = || vec(any::<u8>(), 0..40).prop_map(Bytes::from);
    let count = option::of(0..=i32::MAX as u32);
    prop_oneof![
        vec(any::<u32>(), 0..20).prop_map(InputChunk::text),
        (bytes(), format(), count).prop_map(|(data, format, expected_tokens)| {
            InputChunk::image(data, format).expected_tokens(expected_tokens)
        }),
        bytes().prop_map(InputChunk::dmel),
    ]
}

fn input() -> impl Strategy<Value = ModelInput> {
    let pointer = (".{0,12}", format(), option::of(any::<u32>())).prop_map(
        |(location, format, expected_tokens)| {
            InputChunk::image_url(location, format).expected_tokens(expected_tokens)
        },
    );
    vec(prop_oneof![3 => training_chunk(), 1 => pointer], 0..4)
        .prop_map(|chunks| chunks.into_iter().fold(ModelInput::default(), ModelInput::chunk))
}

fn span() -> impl Strategy<Value = ProvenanceSpan> {
    (any::<bool>(), "[a-z:0-9]{0,8}", any::<u32>(), any::<u32>()).prop_map(
        |(sampled, id, offset, length)| {
            let offset = offset.into();
            let length = length.into();
            if sampled {
                ProvenanceSpan::sampled(id, offset, length)
            } else {
                ProvenanceSpan::prompt(id, offset, length)
            }
        },
    )
}

/// A datum that the builder accepts: built-in inputs of matching length, and custom inputs of any
/// shape.
fn datum() -> impl Strategy<Value = Datum> {
    (1_usize..6)
        .prop_flat_map(|len| {
            let weights = vec(any_f32(), len);
            let targets = vec(any::<i64>(), len);
            let other = option::of(tensor());
            let spans = option::of((vec(span(), 0..3), vec(span(), 0..3)));
            (vec(any::<u32>(), len), targets, weights, other, spans).prop_map(
                move |(tokens, targets, weights, other, spans)| {
                    let mut builder = Datum::builder(tokens);
                    if let Some(other) = other {
                        builder = builder.loss_input("custom_input", other);
                    }
                    builder =
                        builder.loss_input("target_tokens", targets).loss_input("weights", weights);
                    if let Some((mut input, mut loss)) = spans {
                        // The last span covers the remaining tokens.
                        for list in [&mut input, &mut loss] {
                            list.retain(|span| span.length <= 1);
                            let covered: u64 = list.iter().map(|span| span.length).sum();
                            let rest = (len as u64).saturating_sub(covered);
                            list.truncate(len);
                            list.push(ProvenanceSpan::sampled("last", 7, rest));
                        }
                        builder = builder.provenance(input, loss);
                    }
                    builder.build()
                },
            )
        })
        .prop_filter_map("the spans cover the datum", Result::ok)
}

fn config() -> impl Strategy<Value = LossConfig> {
    let setting = prop_oneof![
        any::<f64>().prop_filter("equal to itself", |x| !x.is_nan()).prop_map(LossSetting::Number),
        ".{0,8}".prop_map(LossSetting::Text),
    ];
    proptest::collection::btree_map("[a-z_]{0,8}", setting, 0..4)
        .prop_map(|map| map.into_iter().fold(LossConfig::new(), |config, (k, v)| config.set(k, v)))
}

fn request() -> impl Strategy<Value = ForwardBackward> {
    let seq = option::of((1..=i32::MAX as u64).prop_map(Seq::new));
    let loss = prop_oneof![Just("cross_entropy"), Just("ppo"), Just("brand_new")];
    (".{0,12}", seq, vec(datum(), 0..4), loss, config(), any::<bool>()).prop_map(
        |(model, seq_id, data, loss, loss_fn_config, forward)| {
            let mode = if forward { PassMode::Forward } else { PassMode::ForwardBackward };
            let mut request = ForwardBackward::new(model, data, LossFn::from(loss))
                .loss_fn_config(loss_fn_config)
                .mode(mode);
            request.seq_id = seq_id;
            request
        },
    )
}

fn record() -> impl Strategy<Value = LossRecord> {
    let column = |datums: usize| {
        (vec(0_usize..4, datums), vec(0_usize..4, 0..3), any::<bool>()).prop_flat_map(
            |(rows, trailing, float)| {
                let width: usize = trailing.iter().product();
                let lengths: Vec<usize> = rows.iter().map(|rows| rows * width).collect();
                let total: usize = lengths.iter().sum();
                (vec(any::<i64>(), total), Just((lengths, trailing, float)))
            },
        )
    };
    (0_usize..4).prop_flat_map(move |datums| {
        vec(column(datums), 0..3).prop_map(move |columns| {
            let mut record = LossRecord::new(datums).type_tag("Tag");
            for (i, (numbers, (lengths, trailing, float))) in columns.into_iter().enumerate() {
                let values = if float {
                    let bits = |n: &i64| f32::from_bits(n.unsigned_abs() as u32);
                    TensorValues::Float32(numbers.iter().map(bits).collect())
                } else {
                    TensorValues::Int64(numbers.into())
                };
                record = record
                    .field_with_shape(format!("f{i}"), values, lengths, &trailing[..])
                    .unwrap();
            }
            record
        })
    })
}

fn output() -> impl Strategy<Value = ForwardBackwardOutput> {
    let metrics = proptest::collection::btree_map("[a-z:]{0,8}", -1e9..1e9, 0..4);
    (vec(record(), 0..4), "[A-Za-z]{1,8}", metrics).prop_map(|(records, kind, metrics)| {
        let mut outputs = LossOutputs::default();
        // Records without any datum are not distinguishable from no records.
        if records.iter().any(|record| !LossOutputs::from(record.clone()).is_empty()) {
            for record in records {
                outputs.append(record.into());
            }
        }
        ForwardBackwardOutput::default()
            .loss_fn_output_type(kind)
            .loss_fn_outputs(outputs)
            .metrics(metrics)
    })
}

fn logprobs(len: usize) -> impl Strategy<Value = Option<Logprobs>> {
    option::of(vec(json_f32(), len)).prop_map(move |x| x.filter(|_| len > 0).map(Logprobs::from))
}

fn topk() -> impl Strategy<Value = Option<TopkLogprobs>> {
    let row = |k| vec((any::<u32>(), -100.0_f32..0.0), 1..=k);
    option::of(
        (1_usize..4).prop_flat_map(move |k| {
            vec(option::of(row(k)), 1..4).prop_map(TopkLogprobs::from_rows)
        }),
    )
}

fn sequence() -> impl Strategy<Value = SampledSequence> {
    let reason =
        prop_oneof![Just(StopReason::Stop), Just(StopReason::Length), Just(StopReason::Unknown)];
    (vec(0..=i32::MAX as u32, 0..20), reason, topk()).prop_flat_map(
        |(tokens, stop_reason, topk_logprobs)| {
            logprobs(tokens.len()).prop_map(move |logprobs| {
                SampledSequence::default()
                    .stop_reason(stop_reason)
                    .tokens(tokens.clone())
                    .logprobs(logprobs)
                    .topk_logprobs(topk_logprobs.clone())
            })
        },
    )
}

fn response() -> impl Strategy<Value = SampleResponse> {
    let alt = option::of((1_usize..3, 1_usize..4).prop_flat_map(|(rows, k)| {
        (vec(any::<i64>(), rows * k), vec(json_f32(), rows * k)).prop_map(move |(t, l)| {
            PromptAltTokens::new(
                TensorData::from(t).reshape([rows, k]).unwrap(),
                TensorData::from(l).reshape([rows, k]).unwrap(),
            )
        })
    }));
    // Protobuf does not distinguish a scalar from an unspecified shape.
    let stated = |tensor: &TensorData| *tensor.shape() != Shape::SCALAR;
    let targets = option::of(dense(json_f32()).prop_filter("not a scalar", stated));
    let hits = 0..=i32::MAX as u32;
    (vec(sequence(), 0..3), (0_usize..9).prop_flat_map(logprobs), topk(), hits, targets, alt)
        .prop_map(|(sequences, prompt_logprobs, topk, hits, targets, alt)| {
            SampleResponse::default()
                .sequences(sequences)
                .prompt_logprobs(prompt_logprobs)
                .topk_prompt_logprobs(topk)
                .prompt_cache_hit_tokens(hits)
                .target_prompt_logprobs(targets)
                .prompt_alt_tokens(alt)
        })
}

fn through_json<T: Serialize + DeserializeOwned>(value: &T) -> T {
    serde_json::from_slice(&codec::json::encode(value).unwrap()).unwrap()
}

/// Decodes and encodes a message with prost.
fn through_prost<M: Message + Default>(bytes: &Bytes) -> Bytes {
    M::decode(bytes.clone()).unwrap().encode_to_vec().into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn tensors_round_trip_through_json(tensor in prop_oneof![dense(json_f32()), sparse()]) {
        prop_assert_eq!(&through_json(&tensor), &tensor);
    }

    #[test]
    fn sparse_and_dense_forms_are_equivalent(tensor in sparse()) {
        let dense = tensor.to_dense(100).unwrap();
        prop_assert_eq!(dense.clone().compact().to_dense(100).unwrap(), dense);
    }

    #[test]
    fn compact_is_never_larger(rows in 0_usize..6, width in 0_usize..6, seed in any::<u64>()) {
        let mut bits = seed;
        let cells: Vec<f32> = (0..rows * width)
            .map(|_| {
                bits = bits.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                if bits & 3 == 0 { -0.0 } else { 0.0 }
            })
            .collect();
        let dense = TensorData::from(cells).reshape([rows, width]).unwrap();
        let compact = dense.clone().compact();
        let entries = |t: &TensorData| match (t.row_starts(), t.columns()) {
            (Some(rows), Some(columns)) => rows.len() + 2 * columns.len(),
            _ => t.values().len(),
        };
        prop_assert!(entries(&compact) <= entries(&dense));
        prop_assert_eq!(compact.to_dense(100).unwrap(), dense);
    }

    #[test]
    fn inputs_round_trip_through_json(input in input()) {
        prop_assert_eq!(&through_json(&input), &input);
    }

    #[test]
    fn requests_round_trip_through_protobuf_and_prost(request in request()) {
        let bytes = request.to_proto().unwrap();
        prop_assert_eq!(&ForwardBackward::from_proto(&bytes).unwrap(), &request);
        let peer = through_prost::<peer::ForwardBackwardRequest>(&bytes);
        prop_assert_eq!(&ForwardBackward::from_proto(&peer).unwrap(), &request);
    }

    #[test]
    fn outputs_round_trip_through_protobuf_and_prost(output in output()) {
        let bytes = output.to_proto();
        prop_assert_eq!(&ForwardBackwardOutput::from_proto(&bytes).unwrap(), &output);
        let peer = through_prost::<peer::ForwardBackwardOutput>(&bytes);
        prop_assert_eq!(&ForwardBackwardOutput::from_proto(&peer).unwrap(), &output);
    }

    #[test]
    fn responses_round_trip_through_protobuf_prost_and_json(response in response()) {
        let bytes = response.to_proto();
        prop_assert_eq!(&SampleResponse::from_proto(&bytes).unwrap(), &response);
        let peer = through_prost::<peer::SampleResponse>(&bytes);
        prop_assert_eq!(&SampleResponse::from_proto(&peer).unwrap(), &response);
        prop_assert_eq!(&through_json(&response), &response);
    }

    #[test]
    fn paths_round_trip_through_text(
        run in "[^/]{1,12}",
        name in "[^/]{1,12}",
        kind in 0_usize..3,
    ) {
        let path = TinkerPath::new(run, CheckpointKind::ALL[kind], name).unwrap();
        prop_assert_eq!(&path.to_string().parse::<TinkerPath>().unwrap(), &path);
        prop_assert_eq!(&through_json(&path), &path);
    }

    #[test]
    fn times_round_trip_through_text(
        micros in -62_167_219_200_000_000_i64..253_402_300_800_000_000,
    ) {
        let time = Timestamp::from_unix_micros(micros).unwrap();
        prop_assert_eq!(time.to_string().parse::<Timestamp>().unwrap(), time);
        prop_assert_eq!(time.unix_micros(), micros);
    }

    #[test]
    fn bodies_round_trip_through_compression(body in vec(any::<u8>(), 0..2000)) {
        let small = codec::compress::compress(&body).unwrap();
        prop_assert_eq!(&codec::compress::decompress(&small, body.len()).unwrap()[..], &body[..]);
    }
}
