//! Saving and loading.

use std::sync::Arc;

use bytes::Bytes;
use tinkex_wire::codec::json;
use tinkex_wire::{
    ApiRequest as _, CheckpointKind, LoadWeights, Metadata, ModelId, OptimizerConfig, RequestId,
    SamplerId, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler, Seq, TinkerPath,
};

use super::training::{base_model, check_optimizer, numbered, random, train};
use super::{Intake, Next, digest, or_refuse, run, session, submit};
use crate::error::ApiError;
use crate::state::Shared;
use crate::store::{Checkpoint, Fact, Kind, Line, Lora, Request, Run, Store, now};
use crate::work::{Op, Save, Work};

/// An hour to ten years.
const TTL_SECONDS: std::ops::RangeInclusive<u64> = 3_600..=315_360_000;

/// A checkpoint to go on training from.
pub(crate) fn save_weights(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    let call: SaveWeights = json::decode(&body)?;
    let named = Named {
        kind: Kind::SaveWeights,
        model: call.model_id,
        seq: call.seq_id,
        name: call.path,
        overwrite: call.overwrite,
        ttl_seconds: call.ttl_seconds,
        user_metadata: call.user_metadata,
    };
    named.take(shared, body)
}

/// A checkpoint to sample from, or one that only a sampling session knows.
pub(crate) fn save_weights_for_sampler(
    shared: &Arc<Shared>,
    body: Bytes,
) -> Result<RequestId, ApiError> {
    let call: SaveWeightsForSampler = json::decode(&body)?;
    let (None, Some(n)) = (&call.path, call.sampling_session_seq_id) else {
        let named = Named {
            kind: Kind::SaveWeightsForSampler,
            model: call.model_id,
            seq: call.seq_id,
            name: call.path,
            overwrite: false,
            ttl_seconds: call.ttl_seconds,
            user_metadata: call.user_metadata,
        };
        return named.take(shared, body);
    };
    let (model, seq) = (call.model_id.clone(), call.seq_id.map(Seq::get));
    or_refuse(shared, &model, seq, save_for(shared, call, n, body))
}

/// Weights that only sampling session `n` knows.
fn save_for(
    shared: &Arc<Shared>,
    call: SaveWeightsForSampler,
    n: u32,
    body: Bytes,
) -> Result<RequestId, ApiError> {
    let mut store = shared.store();
    let run = run(&mut store, &call.model_id)?;
    let seq = call.seq_id.map(Seq::get);
    // A resend carries another number for the sampling session, and is the same request.
    let same = SaveWeightsForSampler { sampling_session_seq_id: None, ..call };
    let digest = digest::of_bytes(&json::encode(&same)?);
    let sampler = SamplerId::in_session(&run.session, n);
    let line = Line::Model(run.id.clone());
    let resent =
        seq.is_some_and(|seq| store.lines.get(&line).is_some_and(|l| l.contains_key(&seq)));
    if !resent && store.samplers.contains_key(&sampler) {
        return Err(ApiError::bad(format!("sampling_session_seq_id: {sampler} exists already")));
    }
    let kind = Kind::SaveWeightsForSampler;
    numbered(shared, store, kind, &run, seq, digest, body, Op::SaveFor(sampler))
}

/// A checkpoint to download.
pub(crate) fn save_weights_external(
    shared: &Arc<Shared>,
    body: Bytes,
) -> Result<RequestId, ApiError> {
    let call: SaveWeightsExternal = json::decode(&body)?;
    if call.age_encryption_recipients.as_deref().is_some_and(|keys| !keys.is_empty()) {
        let refused = Err(ApiError::bad(
            "age_encryption_recipients: this server does not encrypt files; \
             they stay on its own disk until they are fetched",
        ));
        return or_refuse(shared, &call.model_id, call.seq_id.map(Seq::get), refused);
    }
    let named = Named {
        kind: Kind::SaveWeightsExternal,
        model: call.model_id,
        seq: call.seq_id,
        name: Some(call.path),
        overwrite: false,
        ttl_seconds: call.ttl_seconds,
        user_metadata: None,
    };
    named.take(shared, body)
}

/// A checkpoint with an address.
struct Named {
    kind: Kind,
    model: ModelId,
    seq: Option<Seq>,
    name: Option<String>,
    overwrite: bool,
    ttl_seconds: Option<u64>,
    user_metadata: Option<Metadata>,
}

impl Named {
    fn take(self, shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
        let (model, seq) = (self.model.clone(), self.seq.map(Seq::get));
        or_refuse(shared, &model, seq, self.submit(shared, body))
    }

    fn submit(self, shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
        check_ttl(self.ttl_seconds)?;
        let mut store = shared.store();
        let run = run(&mut store, &self.model)?;
        let line = Line::Model(run.id.clone());
        let seq = self.seq.map(Seq::get);
        let seq = seq.unwrap_or_else(|| super::next_number(shared, &store, &line));
        let kind = self.kind;
        let save = self.save(seq)?;
        let resent = store.lines.get(&line).is_some_and(|line| line.contains_key(&seq));
        if !resent && !save.overwrite && store.checkpoint(&save.path).is_some() {
            return Err(ApiError::bad(format!(
                "{} exists already; choose another name, or delete it first",
                save.path
            )));
        }
        let digest = digest::of_bytes(&body);
        numbered(shared, store, kind, &run, Some(seq), digest, body, Op::Save(Box::new(save)))
    }

    fn save(self, seq: u64) -> Result<Save, ApiError> {
        let kind = match self.kind {
            Kind::SaveWeights => CheckpointKind::Training,
            Kind::SaveWeightsForSampler => CheckpointKind::Sampler,
            _ => CheckpointKind::External,
        };
        let name = self.name.unwrap_or_else(|| format!("{seq:06}"));
        check_name(&name)?;
        Ok(Save {
            path: TinkerPath::new(self.model, kind, name)?,
            overwrite: self.overwrite,
            ttl_seconds: self.ttl_seconds,
            user_metadata: self.user_metadata,
        })
    }
}

pub(super) fn again_save(row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    let (model, seq) = match &row.line {
        Line::Model(model) => (model.clone(), Some(Seq::new(row.seq))),
        Line::Sampler(_) | Line::Losses(_) => return Err(ApiError::bad("it is not about a model")),
    };
    let kind = row.kind;
    let named = match kind {
        Kind::SaveWeights => {
            let call: SaveWeights = json::decode(body)?;
            let SaveWeights { path: name, ttl_seconds, overwrite, user_metadata, .. } = call;
            Named { kind, model, seq, name, overwrite, ttl_seconds, user_metadata }
        }
        Kind::SaveWeightsForSampler => {
            let call: SaveWeightsForSampler = json::decode(body)?;
            if let (None, Some(n)) = (&call.path, call.sampling_session_seq_id) {
                return train(row, Op::SaveFor(SamplerId::in_session(&row.session, n)));
            }
            let SaveWeightsForSampler { path: name, ttl_seconds, user_metadata, .. } = call;
            Named { kind, model, seq, name, overwrite: false, ttl_seconds, user_metadata }
        }
        _ => {
            let call: SaveWeightsExternal = json::decode(body)?;
            let (name, ttl_seconds) = (Some(call.path), call.ttl_seconds);
            Named { kind, model, seq, name, overwrite: false, ttl_seconds, user_metadata: None }
        }
    };
    train(row, Op::Save(Box::new(named.save(row.seq)?)))
}

/// Weights into a model, or a model of them.
pub(crate) fn load_weights(shared: &Arc<Shared>, body: Bytes) -> Result<RequestId, ApiError> {
    let call: LoadWeights = json::decode(&body)?;
    let seq = call.seq_id.map(Seq::get);
    let taken = take_load(shared, &call, body);
    match &call.model_id {
        Some(model) => or_refuse(shared, model, seq, taken),
        None => taken,
    }
}

fn take_load(shared: &Arc<Shared>, call: &LoadWeights, body: Bytes) -> Result<RequestId, ApiError> {
    call.validate()?;
    let path: TinkerPath = call.path.parse()?;
    if path.kind() != CheckpointKind::Training {
        return Err(ApiError::bad(format!(
            "path: {path} was saved for {}, not to go on training from",
            if path.kind() == CheckpointKind::Sampler { "sampling" } else { "download" }
        )));
    }
    let mut store = shared.store();
    let source = store.checkpoint(&path).map(|kept| kept.row.clone());
    let digest = digest::of_bytes(&body);
    if let Some(model) = &call.model_id {
        let run = run(&mut store, model)?;
        let seq = call.seq_id.map_or_else(
            || super::next_number(shared, &store, &Line::Model(model.clone())),
            Seq::get,
        );
        if seq != 1 {
            return Err(ApiError::bad(format!(
                "LoadWeights is not permitted with seq_id {seq}: only the first request of a model may load"
            )));
        }
        let resent =
            store.lines.get(&Line::Model(model.clone())).is_some_and(|l| l.contains_key(&1));
        let source = match source {
            Some(source) => source,
            None if resent => return resend(&store, model, &digest),
            None => return Err(missing(&path)),
        };
        check_fit(call, &run, &source)?;
        let op = load(&source, call.optimizer, false);
        return numbered(shared, store, Kind::LoadWeights, &run, Some(1), digest, body, op);
    }
    let (Some(owner), Some(n)) = (call.session_id.clone(), call.model_seq_id) else {
        return Err(ApiError::bad("give either a model_id, or a session_id and model_seq_id"));
    };
    session(&mut store, &owner)?;
    let model = ModelId::in_session(&owner, n);
    let source = source.ok_or_else(|| missing(&path))?;
    let row = new_run(shared, call, &source, &model)?;
    let op = load(&source, call.optimizer, true);
    let intake = Intake {
        kind: Kind::LoadWeights,
        session: owner,
        line: Line::Model(model.clone()),
        seq: Some(0),
        digest,
        seed: row.lora.seed,
        samples: 0,
        body,
        facts: vec![Fact::Run(row)],
        next: Next::Work(Work::Train { model, seq: 0, op }),
    };
    submit(shared, store, intake)
}

/// The checkpoint is gone by now, but the request was taken in while it was there.
fn resend(store: &Store, model: &ModelId, digest: &str) -> Result<RequestId, ApiError> {
    let id = store.lines.get(&Line::Model(model.clone())).and_then(|line| line.get(&1));
    let same = id.and_then(|id| store.requests.get(id)).filter(|entry| entry.row.digest == digest);
    same.map(|entry| entry.row.id.clone())
        .ok_or_else(|| ApiError::bad("seq_id 1 was used for another request"))
}

fn load(source: &Checkpoint, optimizer: bool, creates: bool) -> Op {
    Op::Load { folder: source.folder.clone(), path: source.path.clone(), optimizer, creates }
}

/// The model that a checkpoint becomes.
fn new_run(
    shared: &Shared,
    call: &LoadWeights,
    source: &Checkpoint,
    model: &ModelId,
) -> Result<Run, ApiError> {
    let base = call.base_model.clone().unwrap_or_else(|| source.base_model.clone());
    base_model(shared, &base)?;
    if base != source.base_model {
        return Err(ApiError::bad(format!(
            "base_model: {} was trained from {}, not {base}",
            source.path, source.base_model
        )));
    }
    let optimizer = match &call.optimizer_config {
        Some(config) if call.optimizer && *config != source.optimizer => {
            return Err(ApiError::bad(
                "optimizer_config: the saved optimizer is of another kind; leave it out, or load without the optimizer",
            ));
        }
        Some(config) => config.clone(),
        None if call.optimizer => source.optimizer.clone(),
        None => OptimizerConfig::default(),
    };
    check_optimizer(&optimizer)?;
    Ok(Run {
        id: model.clone(),
        session: call.session_id.clone().unwrap_or_else(|| "".into()),
        number: call.model_seq_id.unwrap_or_default(),
        base_model: base,
        lora: Lora { seed: random(), ..source.lora },
        optimizer,
        user_metadata: call.user_metadata.clone(),
        created_at: now(),
        closed: None,
        snapshot: None,
        last_seq: None,
        project_id: None,
    })
}

/// Whether a checkpoint can be loaded into a model that exists.
fn check_fit(call: &LoadWeights, run: &Run, source: &Checkpoint) -> Result<(), ApiError> {
    if source.base_model != run.base_model {
        return Err(ApiError::bad(format!(
            "path: {} was trained from {}, the model from {}",
            source.path, source.base_model, run.base_model
        )));
    }
    let shape = |lora: &Lora| (lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed);
    if shape(&source.lora) != shape(&run.lora) {
        return Err(ApiError::bad(format!(
            "path: rank and trained layers (attn, mlp, unembed) are {:?} in {}, {:?} in the model",
            shape(&source.lora),
            source.path,
            shape(&run.lora)
        )));
    }
    if call.optimizer && source.optimizer.kind != run.optimizer.kind {
        return Err(ApiError::bad(format!(
            "optimizer: {} was saved with {}, the model has {}",
            source.path, source.optimizer.kind, run.optimizer.kind
        )));
    }
    match &call.optimizer_config {
        Some(config) if *config != run.optimizer => Err(ApiError::bad(
            "optimizer_config: the model's optimizer was chosen when it was created",
        )),
        _ => Ok(()),
    }
}

pub(super) fn again_load(store: &Store, row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    let call: LoadWeights = json::decode(body)?;
    let path: TinkerPath = call.path.parse()?;
    let source = store.checkpoint(&path).ok_or_else(|| missing(&path))?;
    train(row, load(&source.row, call.optimizer, row.seq == 0))
}

pub(super) fn missing(path: &TinkerPath) -> ApiError {
    ApiError::not_found(format!("there is no checkpoint {path}"))
}

/// Names become part of addresses: letters, digits, `.`, `_` and `-`.
fn check_name(name: &str) -> Result<(), ApiError> {
    let fine = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    if (1..=128).contains(&name.len()) && name.bytes().all(fine) && !matches!(name, "." | "..") {
        return Ok(());
    }
    let shown: String = name.chars().take(150).collect();
    Err(ApiError::bad(format!(
        "path: {shown:?} is not a name of 1 to 128 letters, digits, dots, dashes and underscores"
    )))
}

/// Whether a time to live is one.
pub(crate) fn check_ttl(seconds: Option<u64>) -> Result<(), ApiError> {
    match seconds {
        Some(seconds) if !TTL_SECONDS.contains(&seconds) => Err(ApiError::bad(format!(
            "ttl_seconds: {seconds} is not from {} to {}",
            TTL_SECONDS.start(),
            TTL_SECONDS.end()
        ))),
        _ => Ok(()),
    }
}
