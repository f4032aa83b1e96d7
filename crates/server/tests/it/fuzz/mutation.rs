//! Random mutations of recorded requests.
//!
//! The server checks a request in layers: method and path, headers, encoding of the body, fields of
//! the body, objects that the fields refer to. An invalid outer layer ends the request there. The
//! outer layers are therefore mutated rarely, so that most cases reach the inner ones, which have
//! far more states. About one of six requests is accepted; these create the state in which the
//! later cases run.

use fastrand::Rng;
use serde_json::{Value, json};
use tinkex_wire::{Datum, ForwardBackward, LossFn, Seq};

use super::recording::{RECORDED_SESSION, RecordedBody, Recording};
use crate::harness::MODEL;

/// Probability of a mutation: `hits` of `out_of` cases. The documentation of a constant describes
/// the mutation and the reason for its probability.
struct Chance {
    hits: u8,
    out_of: u8,
}

/// Replaces the method. Rare, because the router rejects nearly every other method.
const REPLACE_METHOD: Chance = Chance { hits: 1, out_of: 30 };
/// Claims another encoding. Rare, because decompression fails before any field is decoded.
const ADD_CONTENT_ENCODING: Chance = Chance { hits: 1, out_of: 20 };
/// Replaces a path segment. Frequent enough to reach the handlers, which check ids and query
/// parameters; the router rejects most other replaced segments.
const REPLACE_PATH_SEGMENT: Chance = Chance { hits: 1, out_of: 4 };
/// Damages the bytes of the body, to test the decoders. Most damage makes a body invalid, so that
/// the checks after the decoder do not run: most bodies must stay intact.
const DAMAGE_BODY: Chance = Chance { hits: 1, out_of: 3 };
/// Replaces a recorded training pass by one that the server's model can execute. Frequent, because
/// the recorded passes need another model: the server decodes them and then rejects them.
const REPLACE_PASS: Chance = Chance { hits: 3, out_of: 4 };
/// Number of mutations of a JSON body, chosen uniformly. Without a mutation the body is valid; two
/// mutations find errors that need two unusual fields.
const JSON_MUTATIONS: std::ops::Range<usize> = 0..3;
/// Mutates an element of an object or a list instead of replacing the whole. Frequent, because the
/// type of an outer object is a single check; most checks are about the fields inside.
const DESCEND: Chance = Chance { hits: 3, out_of: 4 };
/// Replaces a number by a nearby one instead of any value. The nearby number has the right type and
/// is often valid: it tests limits, sequence numbers and counts.
const USE_NEARBY_NUMBER: Chance = Chance { hits: 1, out_of: 2 };
/// Uses a long text as the new path segment. Rare, because it tests a single limit; the other
/// segments test several checks.
const USE_LONG_SEGMENT: Chance = Chance { hits: 1, out_of: 10 };

impl Chance {
    fn occurs(&self, rng: &mut Rng) -> bool {
        rng.u8(..self.out_of) < self.hits
    }
}

/// Returns a random element.
fn choose<'a, T>(rng: &mut Rng, all: &'a [T]) -> &'a T {
    &all[rng.usize(..all.len())]
}

/// A request to send.
pub(super) struct FuzzRequest {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

impl FuzzRequest {
    /// Returns a recorded request for the objects of `session`, mutated at random.
    pub(super) fn mutated(recording: &Recording, session: &str, rng: &mut Rng) -> Self {
        let mut request = Self {
            method: recording.method.clone(),
            path: recording.path.replace(RECORDED_SESSION, session),
            headers: recording.headers.clone(),
            body: Vec::new(),
        };
        match &recording.body {
            RecordedBody::None => {}
            RecordedBody::Json(recorded) => {
                let mut value = with_objects_of(session, recorded);
                for _ in 0..rng.usize(JSON_MUTATIONS) {
                    mutate_json(&mut value, rng);
                }
                request.body = value.to_string().into_bytes();
            }
            RecordedBody::Proto(_) if REPLACE_PASS.occurs(rng) => {
                request.headers.retain(|(name, _)| name != "content-encoding");
                request.body = executable_pass(session, rng);
            }
            RecordedBody::Proto(recorded) => request.body.clone_from(recorded),
        }
        if !request.body.is_empty() && DAMAGE_BODY.occurs(rng) {
            damage(&mut request.body, rng);
        }
        if REPLACE_PATH_SEGMENT.occurs(rng) {
            request.path = replace_segment(&request.path, rng);
        }
        if ADD_CONTENT_ENCODING.occurs(rng) {
            let encoding = *choose(rng, &["zstd", "br", "identity", "zstd, zstd"]);
            request.headers.push(("content-encoding".to_owned(), encoding.to_owned()));
        }
        if REPLACE_METHOD.occurs(rng) {
            let method = *choose(rng, &["GET", "POST", "PUT", "DELETE", "PATCH"]);
            request.method = method.to_owned();
        }
        request
    }
}

/// Replaces the recorded session and base model by the session and base model of the server.
fn with_objects_of(session: &str, recorded: &Value) -> Value {
    let text = recorded.to_string().replace(RECORDED_SESSION, session);
    let mut value: Value = serde_json::from_str(&text).unwrap();
    if value.get("base_model").is_some() {
        value["base_model"] = json!(MODEL);
    }
    value
}

/// Returns a training pass that the server's model can execute.
fn executable_pass(session: &str, rng: &mut Rng) -> Vec<u8> {
    let data = vec![Datum::completion([3, 4], [5, 6]).unwrap(); rng.usize(1..3)];
    let request = ForwardBackward::new(format!("{session}:train:0"), data, LossFn::CrossEntropy)
        .seq_id(Seq::new(rng.u64(1..200)));
    request.to_proto().unwrap().to_vec()
}

/// Mutates one part of a value: a part of one of its elements, or the whole value.
fn mutate_json(value: &mut Value, rng: &mut Rng) {
    let descend = DESCEND.occurs(rng);
    match value {
        Value::Object(fields) if descend && !fields.is_empty() => mutate_field(fields, rng),
        Value::Array(items) if descend && !items.is_empty() => mutate_item(items, rng),
        Value::Number(number) if USE_NEARBY_NUMBER.occurs(rng) => {
            let nearby = number.as_i64().unwrap_or(0).wrapping_add(rng.i64(-3..=3));
            *value = json!(nearby);
        }
        _ => *value = hostile_value(rng),
    }
}

/// Removes a field (one of eight cases), adds an unknown one (one of eight) or mutates a value.
fn mutate_field(fields: &mut serde_json::Map<String, Value>, rng: &mut Rng) {
    let key = fields.keys().nth(rng.usize(..fields.len())).unwrap().clone();
    match rng.u8(..8) {
        0 => drop(fields.remove(&key)),
        1 => drop(fields.insert(format!("{key}2"), json!(1))),
        _ => mutate_json(fields.get_mut(&key).unwrap(), rng),
    }
}

/// Removes an item (one of six cases), inserts one (one of six) or mutates one.
fn mutate_item(items: &mut Vec<Value>, rng: &mut Rng) {
    let at = rng.usize(..items.len());
    match rng.u8(..6) {
        0 => drop(items.remove(at)),
        1 => items.insert(at, hostile_value(rng)),
        _ => mutate_json(&mut items[at], rng),
    }
}

/// Returns a value that often reveals bugs: a wrong type, a limit, or text that is dangerous as a
/// path.
fn hostile_value(rng: &mut Rng) -> Value {
    let deeply_nested = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let all = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(u64::from(u32::MAX) + 1),
        json!(1e308),
        json!(0.5),
        json!(""),
        json!("x"),
        json!("../../etc/passwd"),
        json!("a/b"),
        json!("tinker://x"),
        json!("tinker://a:train:0/weights/.."),
        json!("\u{0}"),
        json!("é".repeat(300)),
        json!("x".repeat(5_000)),
        json!("NaN"),
        json!("2024-13-99T00:00:00Z"),
        json!([]),
        json!({}),
        json!([null]),
        json!({"": {}}),
        deeply_nested,
        json!(vec![0; 3_000]),
    ];
    choose(rng, &all).clone()
}

/// Damage to the bytes of a body.
#[derive(Clone, Copy)]
enum Damage {
    Truncate,
    InsertByte,
    FlipBit,
    ReplaceByte,
    /// Appends a copy of up to 63 bytes of the body.
    RepeatPiece,
}

/// Damages a body at one to five positions.
fn damage(bytes: &mut Vec<u8>, rng: &mut Rng) {
    use Damage::{FlipBit, InsertByte, RepeatPiece, ReplaceByte, Truncate};
    for _ in 0..rng.usize(1..=5) {
        if bytes.is_empty() {
            bytes.push(rng.u8(..));
        }
        let at = rng.usize(..bytes.len());
        match choose(rng, &[Truncate, InsertByte, FlipBit, ReplaceByte, RepeatPiece]) {
            Truncate => bytes.truncate(at),
            InsertByte => bytes.insert(at, rng.u8(..)),
            FlipBit => bytes[at] ^= 1 << rng.u8(..8),
            ReplaceByte => bytes[at] = rng.u8(..),
            RepeatPiece => {
                let end = bytes.len().min(at + rng.usize(..64));
                bytes.extend_from_within(at..end);
            }
        }
    }
}

/// Replaces a segment of the path, or a name or value of the query, by a hostile one.
fn replace_segment(path: &str, rng: &mut Rng) -> String {
    let hostile =
        ["..", "%2e%2e", "%00", "%ff", "", "a%2Fb", "%2e%2e%2f%2e%2e%2flock", "-1", "é", "%zz"];
    let segment = if USE_LONG_SEGMENT.occurs(rng) {
        "y".repeat(3_000)
    } else {
        (*choose(rng, &hostile)).to_owned()
    };
    let separators: Vec<usize> =
        path.match_indices(['/', '?', '&', '=']).map(|(at, _)| at).collect();
    let start = choose(rng, &separators) + 1;
    let end = separators.iter().copied().find(|at| *at >= start).unwrap_or(path.len());
    format!("{}{segment}{}", &path[..start], &path[end..])
}
