//! [`ToyReplay`]: executes the accepted requests of all models on [toy models](ToyModel), one after
//! the other, and compares the results. Equal results show that the upstream applied each
//! successful request once and in order, and no failed request.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::Value;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::{ForwardBackward, ForwardBackwardOutput, OptimStep};

use crate::replay::{ReplayModels, ReplayedRequest, SavePoint, replay};
use crate::toy_model::ToyModel;

/// Executes requests one after the other.
#[derive(Default)]
pub(crate) struct ToyReplay {
    /// Models, and their accumulated gradients.
    models: BTreeMap<String, (ToyModel, u64)>,
    saved: BTreeMap<SavePoint, ToyModel>,
}

impl ToyReplay {
    /// Executes `requests` and compares their results with the server's results.
    ///
    /// # Errors
    /// Describes the first difference, or the first request that cannot be executed.
    pub(crate) fn check(
        mut self,
        requests: Vec<ReplayedRequest<'_>>,
        folders: &BTreeMap<WeightsLocation, SavePoint>,
    ) -> Result<(), String> {
        replay(&mut self, requests, folders)
    }
}

impl ReplayModels for ToyReplay {
    fn can_execute(&self, request: &ReplayedRequest<'_>) -> bool {
        request.kind != "LoadWeights"
            || request.loads.is_some_and(|source| self.saved.contains_key(source))
    }

    fn execute(&mut self, request: &ReplayedRequest<'_>) -> Result<(), String> {
        let ReplayedRequest { model, seq, kind, body, result, loads } = request;
        let invalid = |error: &dyn std::fmt::Display| format!("{kind} {seq} of {model}: {error}");
        let json = |bytes: &Bytes| serde_json::from_slice::<Value>(bytes).unwrap_or_default();
        let entry = self.models.entry((*model).to_owned());
        let (state, gradients) = entry.or_insert((ToyModel::new(0), 0));
        let (expected, found) = match *kind {
            "CreateModel" => {
                let seed = json(body)["lora_config"]["seed"].as_u64().unwrap_or(0);
                *state = ToyModel::new(seed);
                return Ok(());
            }
            "LoadWeights" => {
                let Some(saved) = loads.and_then(|source| self.saved.get(source)) else {
                    return Err(invalid(&"loads an unknown state"));
                };
                *state = *saved;
                *gradients = 0;
                if !json(body)["optimizer"].as_bool().unwrap_or(false) {
                    state.moments = 0;
                }
                return Ok(());
            }
            "ForwardBackward" => {
                let pass = ForwardBackward::from_proto(body).map_err(|error| invalid(&error))?;
                let output =
                    ForwardBackwardOutput::from_proto(result).map_err(|error| invalid(&error))?;
                let found = output.metrics.get("loss:sum").copied();
                (state.pass(&pass, gradients), found.unwrap_or(f64::NAN))
            }
            "OptimStep" => {
                let step: OptimStep =
                    serde_json::from_slice(body).map_err(|error| invalid(&error))?;
                let found = json(result)["metrics"]["grad"].as_f64();
                (state.step(&step, gradients), found.unwrap_or(f64::NAN))
            }
            _ => return Ok(()),
        };
        if expected.to_bits() != found.to_bits() {
            return Err(format!(
                "result of {kind} {seq} of {model} is {found}, its replay gives {expected}: a \
                 request was applied twice, not at all or in another order"
            ));
        }
        Ok(())
    }

    fn save(&mut self, point: SavePoint) -> Result<(), String> {
        if let Some((model, _)) = self.models.get(&point.0) {
            self.saved.insert(point, *model);
        }
        Ok(())
    }
}
