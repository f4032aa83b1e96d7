//! [`SequentialReplay`]: executes the accepted requests of all models one after the other, without
//! a server, and compares results and saved weights.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use tinkex_server::simulation::Replay;
use tinkex_store::weights::WeightsLocation;
use tinkex_wire::SampleResponse;

/// A state of a model: its id, and the sequence number of the last request that had been executed.
pub(crate) type SavePoint = (String, u64);

/// A request of a model that was accepted and succeeded.
pub(crate) struct ReplayedRequest<'a> {
    pub(crate) model: &'a str,
    pub(crate) seq: u64,
    pub(crate) kind: &'a str,
    pub(crate) body: &'a Bytes,
    pub(crate) result: &'a Bytes,
    /// State that the request loads, if it is known.
    pub(crate) loads: Option<&'a SavePoint>,
}

/// A sample that was accepted and succeeded.
pub(crate) struct ReplayedSample<'a> {
    pub(crate) sampler: &'a str,
    pub(crate) seq: u64,
    pub(crate) seed: u64,
    pub(crate) body: &'a Bytes,
    pub(crate) result: &'a Bytes,
    /// State of the sampled model; `None` for the base model.
    pub(crate) weights: Option<&'a SavePoint>,
}

/// Tokens of a sample, and the bits of their log-probabilities.
type SampledBits = (Vec<u32>, Vec<Option<u32>>);

/// Models on which a replay executes requests.
pub(crate) trait ReplayModels {
    /// Returns whether the state that a request loads has been reached.
    fn can_execute(&self, request: &ReplayedRequest<'_>) -> bool;

    /// Executes a request and compares its result with the server's result.
    ///
    /// # Errors
    /// Describes the difference between the results, or why the request cannot be executed.
    fn execute(&mut self, request: &ReplayedRequest<'_>) -> Result<(), String>;

    /// Saves the current state of the model of `point`, for requests that load this state.
    ///
    /// # Errors
    /// Describes why the state cannot be saved.
    fn save(&mut self, point: SavePoint) -> Result<(), String>;
}

/// Executes the requests of every model in the order of their sequence numbers, and saves the
/// states that `folders` names.
///
/// # Errors
/// Returns the first error of `models`, or names a request that loads a state that never existed.
pub(crate) fn replay(
    models: &mut impl ReplayModels,
    mut requests: Vec<ReplayedRequest<'_>>,
    folders: &BTreeMap<WeightsLocation, SavePoint>,
) -> Result<(), String> {
    requests.sort_by_key(|request| (request.model, request.seq));
    let mut queues: BTreeMap<&str, VecDeque<ReplayedRequest<'_>>> = BTreeMap::new();
    for request in requests {
        queues.entry(request.model).or_default().push_back(request);
    }
    // A model may load a state of another model. The replay must reach that state first.
    let mut progress = true;
    while progress {
        progress = false;
        for queue in queues.values_mut() {
            while let Some(request) = queue.pop_front_if(|next| models.can_execute(next)) {
                models.execute(&request)?;
                let reached = (request.model.to_owned(), request.seq);
                if folders.values().any(|saved| *saved == reached) {
                    models.save(reached)?;
                }
                progress = true;
            }
        }
    }
    let Some(blocked) = queues.values().find_map(VecDeque::front) else { return Ok(()) };
    Err(match blocked.loads {
        Some((source, seq)) => format!(
            "{} loads the state of {source} after request {seq}, which never existed",
            blocked.model
        ),
        None => format!("{} loads weights that were never saved", blocked.model),
    })
}

/// Executes requests one after the other.
pub(crate) struct SequentialReplay<'a> {
    pub(crate) engine: Replay,
    /// Folder of the server's weights.
    pub(crate) weights: &'a Path,
    /// Whether a file of the server may be damaged: its weights are not compared then.
    pub(crate) damaged: bool,
    /// Folder for the weights that the replay saves.
    pub(crate) scratch: &'a Path,
}

impl SequentialReplay<'_> {
    /// Executes `requests` and `samples`, and compares their results and the weights in `folders`
    /// with the server's results and weights.
    ///
    /// # Errors
    /// Describes the first difference, or the first request that cannot be executed.
    pub(crate) fn check(
        mut self,
        requests: Vec<ReplayedRequest<'_>>,
        samples: &[ReplayedSample<'_>],
        folders: &BTreeMap<WeightsLocation, SavePoint>,
    ) -> Result<(), String> {
        replay(&mut self, requests, folders)?;
        samples.iter().try_for_each(|sample| self.compare_sample(sample))?;
        if self.damaged {
            return Ok(());
        }
        let local = folders.iter().filter_map(|(weights, saved)| Some((weights.local()?, saved)));
        local.into_iter().try_for_each(|(name, saved)| self.compare_weights(name, saved))
    }

    /// Returns the folder of a state that the replay has saved.
    fn folder_of(&self, (model, seq): &SavePoint) -> PathBuf {
        self.scratch.join(format!("{}-{seq}", model.replace([':', '/'], "_")))
    }

    /// Draws a sample alone, and compares its tokens and log-probabilities with the server's result.
    fn compare_sample(&self, sample: &ReplayedSample<'_>) -> Result<(), String> {
        let ReplayedSample { sampler, seq, seed, body, result, weights } = sample;
        let describe =
            |error: &dyn std::fmt::Display| format!("sample {seq} of {sampler}: {error}");
        let folder = weights.map(|point| self.folder_of(point));
        let expected =
            self.engine.sample(body, *seed, folder.as_deref()).map_err(|error| describe(&error))?;
        let found = SampleResponse::from_proto(result).map_err(|error| describe(&error))?;
        let bits = |response: &SampleResponse| -> Vec<SampledBits> {
            let sequences = response.sequences.iter();
            let bits = sequences.map(|sequence| {
                let logprobs = sequence.logprobs.iter().flat_map(|values| values.iter());
                (sequence.tokens.to_vec(), logprobs.map(|value| value.map(f32::to_bits)).collect())
            });
            bits.collect()
        };
        if bits(&expected) != bits(&found) {
            return Err(describe(&"differs from its replay"));
        }
        Ok(())
    }

    /// Compares the files of a weights folder of the server with the replayed state, if the folder
    /// still exists.
    fn compare_weights(&self, name: &str, saved: &SavePoint) -> Result<(), String> {
        let expected_folder = self.folder_of(saved);
        for entry in std::fs::read_dir(self.weights.join(name)).into_iter().flatten().flatten() {
            let file = entry.file_name();
            let found = std::fs::read(entry.path());
            let expected = std::fs::read(expected_folder.join(&file));
            if let (Ok(found), Ok(expected)) = (found, expected)
                && found != expected
            {
                let (model, seq) = saved;
                let file = file.to_string_lossy();
                return Err(format!(
                    "{file} of {model} after request {seq} differs from its replay"
                ));
            }
        }
        Ok(())
    }
}

impl ReplayModels for SequentialReplay<'_> {
    fn can_execute(&self, request: &ReplayedRequest<'_>) -> bool {
        request.kind != "LoadWeights"
            || request.loads.is_some_and(|source| self.folder_of(source).is_dir())
    }

    fn execute(&mut self, request: &ReplayedRequest<'_>) -> Result<(), String> {
        let ReplayedRequest { model, seq, kind, body, result, loads } = request;
        if let Some(source) = loads {
            let folder = self.folder_of(source);
            return self.engine.load(model, body, &folder);
        }
        let expected = self
            .engine
            .execute(model, kind, body)
            .map_err(|error| format!("replay of {kind} {seq} of {model}: {error}"))?;
        if expected.is_some_and(|expected| expected != **result) {
            return Err(format!("result of {kind} {seq} of {model} differs from its replay"));
        }
        Ok(())
    }

    fn save(&mut self, point: SavePoint) -> Result<(), String> {
        let folder = self.folder_of(&point);
        self.engine.save(&point.0, &folder)
    }
}
