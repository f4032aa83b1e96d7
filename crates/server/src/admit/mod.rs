//! Admission: from a request of the wire to work in line, or a refusal that changes nothing.
//!
//! A request is checked as far as it can be without running it, written down, and only then lined
//! up and promised. The same request again gets the same promise; another one under its number is
//! refused.

mod digest;
mod loss;
mod sampling;
mod training;
mod weights;

use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use bytes::Bytes;
use tinkex_autodiff::LossProgram;
use tinkex_wire::{
    CustomLossCreated, LossId, ModelId, RequestId, SequenceId, SessionId, SubmitResponse,
};

use crate::error::ApiError;
use crate::queue::Late;
use crate::settle::{Settled, settle};
use crate::state::Shared;
use crate::store::{Fact, Fault, Kind, Line, Phase, Request, Run, Store, Undone, Written, now};
use crate::work::{Job, Op, Work};

pub(crate) use self::loss::create_custom_loss;
pub(crate) use self::sampling::sample;
pub(crate) use self::training::{create_model, forward_backward, optim_step};
pub(crate) use self::weights::{
    check_ttl, load_weights, save_weights, save_weights_external, save_weights_for_sampler,
};

/// A request that may come in.
struct Intake {
    kind: Kind,
    session: SessionId,
    line: Line,
    /// Its number; the next one if its client gave none.
    seq: Option<u64>,
    digest: String,
    seed: u64,
    samples: u32,
    body: Bytes,
    /// Facts that come with it.
    facts: Vec<Fact>,
    next: Next,
}

/// What follows once it is written down.
enum Next {
    Work(Work),
    Answer(Settled),
    /// A custom loss that may be used from now on.
    Learn(LossId, Arc<LossProgram>),
}

impl Next {
    /// Bytes that it takes beyond those of its request.
    fn spread(&self) -> usize {
        match self {
            Self::Work(work) => work.spread(),
            Self::Answer(_) | Self::Learn(..) => 0,
        }
    }
}

/// Takes a request in and returns its id. Nothing is promised before [`promise`] says so.
fn submit(
    shared: &Arc<Shared>,
    mut store: MutexGuard<'_, Store>,
    intake: Intake,
) -> Result<RequestId, ApiError> {
    let Intake { kind, session, line, seq, digest, seed, samples, body, facts, next } = intake;
    let seq = match seq {
        Some(seq) => seq,
        None => next_number(shared, &store, &line),
    };
    check_number(&line, seq)?;
    let known = store.lines.get(&line);
    if let Some(id) = known.and_then(|line| line.get(&seq)) {
        let same = store.requests.get(id).is_some_and(|entry| entry.row.digest == digest);
        return if same {
            Ok(id.clone())
        } else {
            Err(ApiError::bad(format!(
                "seq_id {seq} was used for another request; a new request needs a new number"
            )))
        };
    }
    if let Line::Model(model) = &line {
        let next = shared.queue.next_of(model);
        if seq < next {
            return Err(ApiError::bad(format!(
                "seq_id {seq} of {model} comes too late: the model has gone on to {next}"
            )));
        }
    }
    let new_run = facts.iter().find_map(|fact| match fact {
        Fact::Run(run) => Some(&run.id),
        _ => None,
    });
    if let Some(id) = new_run.filter(|id| store.runs.contains_key(*id)) {
        return Err(ApiError::bad(format!("model_seq_id: {id} exists already")));
    }
    let bytes = body.len() + next.spread();
    check_room(shared, bytes)?;
    store.touch(&session);
    if let Line::Model(model) = &line
        && let Some(run) = store.runs.get_mut(model)
    {
        run.seen = now();
    }
    let id = RequestId::from(uuid::Uuid::new_v4().simple().to_string());
    let (number, own) = (store.disk.number(), id.clone());
    let row =
        Request { number, id: own, kind, session, line, seq, digest, seed, samples, at: now() };
    shared.queue.expect(bytes);
    let (shared, own) = (Arc::clone(shared), id.clone());
    let then = Box::new(move |written: std::io::Result<()>| {
        shared.queue.expected(bytes);
        match written {
            Ok(()) => {
                let mut store = shared.store();
                let next = match store.request_written(&own) {
                    Written::Wanted => next,
                    Written::Cancelled => Next::Answer(Settled::cancelled()),
                };
                follow(&shared, &mut store, own, bytes, next);
            }
            Err(why) => {
                crate::log::warn(format_args!("a request could not be written down: {why}"));
                lose(&mut shared.store(), &own);
            }
        }
    });
    store.open_request(row, facts, body, then);
    Ok(id)
}

/// A request that is refused for good leaves no gap: those behind it need not wait for it.
fn or_refuse(
    shared: &Shared,
    model: &ModelId,
    seq: Option<u64>,
    taken: Result<RequestId, ApiError>,
) -> Result<RequestId, ApiError> {
    if let (Err(error), Some(seq)) = (&taken, seq)
        && error.is_final()
    {
        // Not if it was another body under a number that is in line: that one is waited for.
        let store = shared.store();
        let line = store.lines.get(&Line::Model(model.clone()));
        if line.is_none_or(|line| !line.contains_key(&seq)) {
            shared.queue.refuse(model, seq);
        }
    }
    taken
}

/// Numbers of a model's requests end where the protocol's do; those of samples are in blocks, one
/// for each client, and only the very last has none behind it.
fn check_number(line: &Line, seq: u64) -> Result<(), ApiError> {
    let most = match line {
        Line::Model(_) => i32::MAX.unsigned_abs().into(),
        Line::Sampler(_) | Line::Losses(_) => u64::MAX - 1,
    };
    if seq > most {
        return Err(ApiError::bad(format!("seq_id: {seq} is more than {most}")));
    }
    Ok(())
}

/// The number behind the last one of a line.
fn next_number(shared: &Shared, store: &Store, line: &Line) -> u64 {
    let last = store.lines.get(line).and_then(|line| line.keys().next_back().copied());
    let next = last.map_or(0, |last| last.saturating_add(1));
    match line {
        Line::Model(model) => next.max(shared.queue.next_of(model)),
        Line::Sampler(_) | Line::Losses(_) => next,
    }
}

fn check_room(shared: &Shared, bytes: usize) -> Result<(), ApiError> {
    let limits = &shared.options.limits;
    let (count, held) = shared.queue.size();
    if count >= limits.queued_requests {
        let why = format!("{count} requests are in line, the most this server holds; come back");
        return Err(ApiError::busy(why, 1_000));
    }
    if held > 0 && held.saturating_add(bytes) > limits.queued_bytes {
        let why = format!(
            "requests of {held} bytes are in line, and this one of {bytes} would be more than {}; come back",
            limits.queued_bytes
        );
        return Err(ApiError::busy(why, 1_000));
    }
    Ok(())
}

/// Does what follows once a request is on disk. The store stays locked, so that a cancel comes
/// either before all of it or after.
fn follow(shared: &Arc<Shared>, store: &mut Store, id: RequestId, bytes: usize, next: Next) {
    let work = match next {
        Next::Work(work) => work,
        Next::Answer(settled) => return settle(shared, store, &id, settled),
        Next::Learn(loss, graph) => {
            store.losses.insert(loss.clone(), graph);
            let settled = Settled::json(&CustomLossCreated { loss_id: loss });
            return settle(shared, store, &id, settled);
        }
    };
    if let Err(Late(id)) = shared.queue.push(Job { id, bytes, work }, Instant::now()) {
        let failed = Settled::failed(Fault::User, "its turn was over before it was written down");
        settle(shared, store, &id, failed);
    }
}

/// A request that could not be written down never was; nor was the model it would have made.
fn lose(store: &mut Store, id: &RequestId) {
    let entry = store.requests.get(id);
    let made = entry.and_then(|entry| match (&entry.row.line, entry.row.seq) {
        (Line::Model(model), 0) => Some(model.clone()),
        _ => None,
    });
    if let Some(model) = made {
        store.runs.remove(&model);
    }
    store.request_lost(id);
}

/// Waits until a request is on disk; that is the promise.
pub(crate) async fn promise(shared: &Shared, id: RequestId) -> Result<SubmitResponse, ApiError> {
    loop {
        let changed = {
            let store = shared.store();
            let Some(entry) = store.requests.get(&id) else {
                return Err(ApiError::disk(&std::io::Error::other("the disk may be full")));
            };
            if !matches!(entry.phase, Phase::Writing { .. }) {
                return Ok(ticket(&entry.row));
            }
            Arc::clone(&entry.changed).notified_owned()
        };
        changed.await;
    }
}

fn ticket(row: &Request) -> SubmitResponse {
    let model_id = match &row.line {
        Line::Model(model) => Some(model.clone()),
        Line::Sampler(_) | Line::Losses(_) => None,
    };
    let name = |j| {
        SequenceId::from(match &row.line {
            Line::Sampler(sampler) => format!("{sampler}:{}:{j}", row.seq),
            Line::Model(_) | Line::Losses(_) => format!("{}:{j}", row.id),
        })
    };
    let sample_sequence_ids =
        (row.kind == Kind::Sample).then(|| (0..row.samples).map(name).collect());
    SubmitResponse { request_id: row.id.clone(), model_id, sample_sequence_ids }
}

/// Lines up again what a restart interrupted.
pub(crate) fn readmit(shared: &Arc<Shared>, undone: Undone) {
    let Undone { row, body } = undone;
    let bytes = body.as_ref().map_or(0, Bytes::len);
    let next = match body {
        Ok(body) => again(shared, &row, &body).map_err(|why| (Fault::User, why.detail)),
        Err(why) => {
            let why = format!("the request was lost: {why}");
            crate::log::warn(format_args!("{}: {why}", row.id));
            Err((Fault::Server, why))
        }
    };
    let next = next.unwrap_or_else(|(fault, why)| match &row.line {
        // Not before those in front of it.
        Line::Model(model) => {
            let (model, op) = (model.clone(), Op::Fail(fault, why));
            Next::Work(Work::Train { model, seq: row.seq, op })
        }
        Line::Sampler(_) | Line::Losses(_) => Next::Answer(Settled::failed(fault, why)),
    });
    let bytes = bytes + next.spread();
    follow(shared, &mut shared.store(), row.id.clone(), bytes, next);
}

fn again(shared: &Arc<Shared>, row: &Request, body: &Bytes) -> Result<Next, ApiError> {
    match row.kind {
        Kind::CreateModel => training::again_create(row),
        Kind::ForwardBackward => training::again_pass(shared, row, body),
        Kind::OptimStep => training::again_step(row, body),
        Kind::SaveWeights | Kind::SaveWeightsForSampler | Kind::SaveWeightsExternal => {
            weights::again_save(row, body)
        }
        Kind::LoadWeights => weights::again_load(&shared.store(), row, body),
        Kind::CreateCustomLoss => loss::again(row, body),
        Kind::Sample => sampling::again(shared, row, body),
    }
}

/// Brings back the custom losses of sessions that are still open.
pub(crate) fn relearn_losses(shared: &Shared) {
    let mut store = shared.store();
    let reader = store.reader();
    let known: Vec<_> = store
        .requests
        .values()
        .filter(|entry| entry.row.kind == Kind::CreateCustomLoss && entry.answered_at().is_some())
        .map(|entry| Arc::clone(&entry.row))
        .collect();
    for row in known {
        let learned = reader.payload(row.number).map_err(|why| ApiError::disk(&why));
        match learned.and_then(|body| loss::again(&row, &body)) {
            Ok(Next::Learn(id, graph)) => drop(store.losses.insert(id, graph)),
            Ok(_) => {}
            Err(why) => {
                crate::log::warn(format_args!("a custom loss was lost: {}", why.detail));
            }
        }
    }
}

/// A session that may go on.
fn session<'a>(store: &'a mut Store, id: &SessionId) -> Result<&'a mut Store, ApiError> {
    match store.sessions.get(id) {
        None => Err(ApiError::not_found(format!("there is no session {id}"))),
        Some(kept) if kept.row.end.is_some() => {
            Err(ApiError::forbidden(format!("session {id} is over; open a new one")))
        }
        Some(_) => Ok(store),
    }
}

/// A model that may be used.
fn run(store: &mut Store, id: &ModelId) -> Result<Run, ApiError> {
    let run = store.runs.get(id).map(|kept| kept.row.clone());
    let run = run.ok_or_else(|| ApiError::not_found(format!("there is no model {id}")))?;
    session(store, &run.session)?;
    match &run.closed {
        Some(why) => Err(ApiError::bad(format!("{id} cannot be used: {why}"))),
        None => Ok(run),
    }
}
