//! Training passes for servers without protobuf.
//!
//! Servers of the first protocol version, such as SkyRL 0.3.0, accept training passes only as JSON
//! and have a separate route for passes without a gradient. Such servers expect one number per
//! token in each tensor and would read the elements of a matrix as tokens, so validation rejects matrices.

use serde::ser::{SerializeMap, SerializeSeq, SerializeStruct};
use serde::{Serialize, Serializer};

use crate::codec::json;
use crate::datum::{Datum, DatumFields};
use crate::future::{ResultPayload, SubmitResponse};
use crate::loss::{LossConfig, LossSetting};
use crate::request::{ApiRequest, RequestBody, SubmitRequest};
use crate::route::Route;
use crate::training::{ForwardBackward, ForwardBackwardOutput, PassMode};
use crate::{DecodeError, InvalidInput};

/// Encodes a [`ForwardBackward`] as JSON for servers of the first protocol version.
///
/// ```
/// use tinkex_wire::{ApiRequest, Datum, ForwardBackward, LossFn, PassMode, JsonForwardBackward};
///
/// let data = vec![Datum::completion([1, 2], [3])?];
/// let pass = ForwardBackward::new("model_1", data, LossFn::CrossEntropy);
/// assert_eq!(JsonForwardBackward(&pass).target()?, "/api/v1/forward_backward");
///
/// let forward = pass.mode(PassMode::Forward);
/// assert_eq!(JsonForwardBackward(&forward).target()?, "/api/v1/forward");
/// # Ok::<_, tinkex_wire::InvalidInput>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct JsonForwardBackward<'a>(pub &'a ForwardBackward);

impl ApiRequest for JsonForwardBackward<'_> {
    type Response = SubmitResponse;
    const ROUTE: Route = Route::ForwardBackward;

    fn validate(&self) -> Result<(), InvalidInput> {
        self.0.validate()?;
        for (i, datum) in self.0.data.iter().enumerate() {
            if let Some((name, _)) = datum.loss_inputs().find(|(_, tensor)| tensor.rank() > 1) {
                let reason = "the server accepts one number per token, not a matrix";
                let field = format!("data[{i}].loss_fn_inputs[{name:?}]");
                return Err(InvalidInput::new(field, reason));
            }
        }
        Ok(())
    }

    fn target(&self) -> Result<String, InvalidInput> {
        match self.0.mode {
            PassMode::ForwardBackward => Self::ROUTE.path(&[]),
            // The current protocol has no such route, so the route table does not list it.
            PassMode::Forward => Ok("/api/v1/forward".to_owned()),
        }
    }

    fn encode_body(&self) -> Result<RequestBody, InvalidInput> {
        Ok(RequestBody::Json(json::encode(self)?))
    }
}

impl SubmitRequest for JsonForwardBackward<'_> {
    type Output = ForwardBackwardOutput;
    const PROTO_OUTPUT: bool = ForwardBackward::PROTO_OUTPUT;

    fn request_type(&self) -> &'static str {
        self.0.request_type()
    }

    fn decode_output(payload: &ResultPayload) -> Result<ForwardBackwardOutput, DecodeError> {
        ForwardBackward::decode_output(payload)
    }
}

impl Serialize for JsonForwardBackward<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let field = match self.0.mode {
            PassMode::ForwardBackward => "forward_backward_input",
            PassMode::Forward => "forward_input",
        };
        let mut out = serializer.serialize_struct("JsonForwardBackward", 3)?;
        out.serialize_field("model_id", &self.0.model_id)?;
        if let Some(seq) = &self.0.seq_id {
            out.serialize_field("seq_id", seq)?;
        }
        out.serialize_field(field, &PassFields(self.0))?;
        out.end()
    }
}

struct PassFields<'a>(&'a ForwardBackward);

impl Serialize for PassFields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_struct("PassFields", 3)?;
        out.serialize_field("data", &DatumList(&self.0.data))?;
        out.serialize_field("loss_fn", self.0.loss_fn.as_str())?;
        if !self.0.loss_fn_config.is_empty() {
            out.serialize_field("loss_fn_config", &LossFields(&self.0.loss_fn_config))?;
        }
        out.end()
    }
}

struct DatumList<'a>(&'a [Datum]);

impl Serialize for DatumList<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_seq(Some(self.0.len()))?;
        for datum in self.0 {
            // The first protocol version has no provenance.
            out.serialize_element(&DatumFields { datum, provenance: None })?;
        }
        out.end()
    }
}

struct LossFields<'a>(&'a LossConfig);

impl Serialize for LossFields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut out = serializer.serialize_map(Some(self.0.iter().len()))?;
        for (name, setting) in self.0.iter() {
            match setting {
                LossSetting::Number(number) => out.serialize_entry(name, number)?,
                LossSetting::Text(text) => out.serialize_entry(name, text)?,
            }
        }
        out.end()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::ids::Seq;
    use crate::loss::LossFn;
    use crate::tensor::TensorData;

    fn body(pass: &ForwardBackward) -> Value {
        let RequestBody::Json(bytes) = JsonForwardBackward(pass).body().unwrap() else {
            panic!("not JSON")
        };
        serde_json::from_slice(&bytes).unwrap()
    }

    fn pass(mode: PassMode) -> ForwardBackward {
        let data = vec![Datum::completion([1, 2], [3]).unwrap()];
        let seq_id = Some(Seq::FIRST);
        ForwardBackward { mode, seq_id, ..ForwardBackward::new("model_1", data, LossFn::Ppo) }
    }

    #[test]
    fn pass_is_encoded_as_json() {
        let mut pass = pass(PassMode::ForwardBackward);
        pass.loss_fn_config = LossConfig::new().set("clip_low_threshold", 0.8);
        let input = json!({
            "data": [{
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
                    "weights": {"data": [0.0, 1.0], "dtype": "float32", "shape": [2]},
                },
            }],
            "loss_fn": "ppo",
            "loss_fn_config": {"clip_low_threshold": 0.8},
        });
        let seq = Seq::FIRST.get();
        let expected =
            json!({"model_id": "model_1", "seq_id": seq, "forward_backward_input": input});
        assert_eq!(body(&pass), expected);
    }

    #[test]
    fn forward_pass_uses_forward_input() {
        let body = body(&pass(PassMode::Forward));
        assert!(body["forward_input"]["data"].is_array(), "{body}");
        assert!(body["forward_input"].get("loss_fn_config").is_none(), "{body}");
        assert!(body.get("forward_backward_input").is_none(), "{body}");
    }

    #[test]
    fn matrix_is_rejected_with_its_field_name() {
        let rows = TensorData::from_rows(&[[2_i64, 3], [3, 4]]).unwrap();
        let mut pass = pass(PassMode::ForwardBackward);
        let input = pass.data[0].model_input().clone();
        pass.data.push(Datum::from_parts(input, vec![("target_tokens".into(), rows)], None));
        let error = JsonForwardBackward(&pass).body().unwrap_err().to_string();
        assert!(error.contains("data[1].loss_fn_inputs[\"target_tokens\"]"), "{error}");
    }
}
