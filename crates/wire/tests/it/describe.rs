//! Conversion of decoded types to the form of the recorded `.decoded.json` files.

use serde_json::{Value, json};
use tinkex_wire::*;

fn float(number: f32) -> Value {
    if number.is_nan() { json!("NaN") } else { json!(number) }
}

fn values(tensor: &TensorData) -> Value {
    match tensor.values() {
        TensorValues::Int64(numbers) => json!(&numbers[..]),
        TensorValues::Float32(numbers) => numbers.iter().copied().map(float).collect(),
    }
}

fn tensor(tensor: &TensorData) -> Value {
    let dtype = match tensor.dtype() {
        DType::Int64 => "DTYPE_INT64",
        DType::Float32 => "DTYPE_FLOAT32",
    };
    let shape = tensor.shape().dims();
    match (tensor.row_starts(), tensor.columns()) {
        (Some(rows), Some(columns)) => json!({
            "dtype": dtype, "shape": shape, "encoding": "sparse_csr",
            "sparse_csr": {"values": values(tensor), "crow_indices": rows, "col_indices": columns},
        }),
        _ => json!({
            "dtype": dtype, "shape": shape, "encoding": "dense", "dense": values(tensor),
        }),
    }
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn tokens(tokens: &[u32]) -> Value {
    tokens.iter().map(|token| token.cast_signed()).collect()
}

fn chunk(chunk: &InputChunk) -> Value {
    match chunk {
        InputChunk::EncodedText { tokens: ids, .. } => {
            json!({"encoded_text": {"tokens_int32": tokens(ids)}})
        }
        InputChunk::Image { data, format, expected_tokens, .. } => {
            let mut image = json!({"data_base64": base64(data), "format": format});
            if let Some(n) = expected_tokens {
                image["expected_tokens"] = json!(n);
            }
            json!({ "image": image })
        }
        InputChunk::Dmel { dmel, .. } => json!({"dmel": {"dmel_base64": base64(dmel)}}),
        other => panic!("cannot be in a training request: {other:?}"),
    }
}

fn spans(spans: Option<&[ProvenanceSpan]>) -> Value {
    let span = |span: &ProvenanceSpan| {
        let range = json!({
            "sequence_id": span.sequence_id, "offset": span.offset, "length": span.length,
        });
        match span.source {
            SpanSource::Prompt => json!({ "prompt_tokens": range }),
            SpanSource::Sampled => json!({ "sampled_tokens": range }),
            other => panic!("unknown source {other:?}"),
        }
    };
    spans.unwrap_or_default().iter().map(span).collect()
}

pub(crate) fn request(request: &ForwardBackward) -> Value {
    let data: Vec<Value> = request
        .data
        .iter()
        .map(|datum| {
            let inputs: JsonObject =
                datum.loss_inputs().map(|(k, v)| (k.to_owned(), tensor(v))).collect();
            let provenance = datum.provenance();
            json!({
                "model_input": datum.model_input().chunks.iter().map(chunk).collect::<Value>(),
                "loss_fn_inputs": inputs,
                "model_input_spans": spans(provenance.map(|p| &p.model_input[..])),
                "loss_fn_input_spans": spans(provenance.map(|p| &p.loss_inputs[..])),
            })
        })
        .collect();
    let numbers: JsonObject = request
        .loss_fn_config
        .iter()
        .filter_map(|(name, _)| {
            Some((name.to_owned(), json!(request.loss_fn_config.number(name)?)))
        })
        .collect();
    let settings: JsonObject = request
        .loss_fn_config
        .iter()
        .map(|(name, setting)| {
            let value = match setting {
                LossSetting::Number(number) => json!({ "number": number }),
                LossSetting::Text(text) => json!({ "text": text }),
            };
            (name.to_owned(), value)
        })
        .collect();
    json!({
        "message": "tinker_public.ForwardBackwardRequest",
        "model_id": request.model_id,
        "seq_id": request.seq_id,
        "loss_fn": request.loss_fn.as_str(),
        "forward_only": request.mode == PassMode::Forward,
        "loss_fn_config": numbers,
        "loss_fn_config_v2": settings,
        "data": data,
    })
}

fn topk(topk: &TopkLogprobs) -> Value {
    // Use the public interface, which removes padding.
    let rows: Vec<Value> = topk
        .rows()
        .map(|row| row.map_or(Value::Null, |row| row.map(|(t, l)| json!([t, l])).collect()))
        .collect();
    json!({"k": topk.k(), "length": topk.len(), "rows": rows})
}

pub(crate) fn sample(response: &SampleResponse) -> Value {
    let sequences: Vec<Value> = response
        .sequences
        .iter()
        .map(|sequence| {
            let mut out = json!({
                "stop_reason":
                    format!("STOP_REASON_{}", sequence.stop_reason.as_str().to_uppercase()),
                "tokens_int32": tokens(&sequence.tokens),
            });
            if let Some(logprobs) = &sequence.logprobs {
                let numbers = logprobs.as_slice().iter().copied().map(float);
                out["logprobs_float32"] = numbers.collect();
            }
            if let Some(top) = &sequence.topk_logprobs {
                out["topk_sampled_logprobs"] = topk(top);
            }
            out
        })
        .collect();
    let mut out = json!({
        "message": "tinker_public.SampleResponse",
        "sequences": sequences,
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
    });
    if let Some(logprobs) = &response.prompt_logprobs {
        out["prompt_logprobs_float32"] =
            logprobs.iter().map(|logprob| logprob.map_or(json!("NaN"), float)).collect();
    }
    if let Some(top) = &response.topk_prompt_logprobs {
        out["topk_prompt_logprobs"] = topk(top);
    }
    if let Some(targets) = &response.target_prompt_logprobs {
        out["target_prompt_logprobs"] = tensor(targets);
    }
    if let Some(alt) = &response.prompt_alt_tokens {
        out["prompt_alt_tokens"] =
            json!({"tokens": tensor(&alt.tokens), "logprobs": tensor(&alt.logprobs)});
    }
    out
}

pub(crate) fn output(output: &ForwardBackwardOutput) -> Value {
    let datums: Vec<Value> = output
        .loss_fn_outputs
        .iter()
        .map(|datum| {
            let tensors = datum.names().map(|name| {
                let data = datum.tensor(name).unwrap();
                (name.to_owned(), json!({"shape": data.shape().dims(), "data": values(&data)}))
            });
            tensors.collect::<JsonObject>().into()
        })
        .collect();
    json!({
        "message": "tinker_public.ForwardBackwardOutput",
        "loss_fn_output_type": output.loss_fn_output_type,
        "metrics": output.metrics,
        "datums": datums,
    })
}

/// Normalizes a recorded response: widens narrow integers, removes padding, splits batched tensors
/// into datums, and shortens qualified names.
pub(crate) fn normalized(recorded: &Value) -> Value {
    let mut out = recorded.clone();
    if let Some(sequences) = out.get_mut("sequences").and_then(Value::as_array_mut) {
        for sequence in sequences {
            if let Some(top) = sequence.get_mut("topk_sampled_logprobs") {
                *top = topk_rows(top);
            }
        }
    }
    if let Some(top) = out.get_mut("topk_prompt_logprobs") {
        *top = topk_rows(top);
    }
    if let Some(alt) = out.get_mut("prompt_alt_tokens") {
        alt["tokens"]["dtype"] = json!("DTYPE_INT64");
    }
    if out["message"] == "tinker_public.ForwardBackwardOutput" {
        let records = out["loss_fn_outputs"].as_array().unwrap();
        let datums: Vec<Value> = records.iter().flat_map(record_datums).collect();
        let qualified = out["loss_fn_output_type"].as_str().unwrap();
        let short = qualified.rsplit(':').next().unwrap().to_owned();
        out["loss_fn_output_type"] = json!(short);
        out["datums"] = datums.into();
        out.as_object_mut().unwrap().remove("loss_fn_outputs");
    }
    out
}

fn topk_rows(topk: &Value) -> Value {
    let k = topk["k"].as_u64().unwrap();
    let length = topk["length"].as_u64().unwrap();
    let cell = |at: u64| {
        let at = usize::try_from(at).unwrap();
        json!([topk["token_ids_int32"][at], topk["logprobs_float32"][at]])
    };
    let padding = json!([0, -99999.0]);
    let rows: Vec<Value> = (0..length)
        .map(|row| {
            let cells: Vec<Value> = (0..k)
                .map(|column| cell(row * k + column))
                .take_while(|cell| *cell != padding)
                .collect();
            if cells.is_empty() { Value::Null } else { cells.into() }
        })
        .collect();
    json!({"k": k, "length": length, "rows": rows})
}

fn record_datums(record: &Value) -> Vec<Value> {
    let count = usize::try_from(record["num_datums"].as_u64().unwrap()).unwrap();
    (0..count)
        .map(|datum| {
            let fields = record["fields"].as_object().unwrap();
            let tensors = fields.iter().map(|(name, field)| {
                let size = match field["dtype"].as_str().unwrap() {
                    "DTYPE_INT64" => 8,
                    "DTYPE_FLOAT32" | "DTYPE_INT32" => 4,
                    other => panic!("{other}"),
                };
                let at = |i: usize| {
                    usize::try_from(field["offsets_int64_bytes"][i].as_u64().unwrap()).unwrap()
                        / size
                };
                let data = &field["data"].as_array().unwrap()[at(datum)..at(datum + 1)];
                let trailing: Vec<u64> = field["trailing_shape"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|dim| dim.as_u64().unwrap())
                    .collect();
                let rows = data.len() as u64 / trailing.iter().product::<u64>();
                let shape: Vec<u64> = [rows].into_iter().chain(trailing).collect();
                (name.clone(), json!({"shape": shape, "data": data}))
            });
            tensors.collect::<JsonObject>().into()
        })
        .collect()
}
