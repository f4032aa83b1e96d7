//! API keys, users and their limits.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tinkex_store::clock::timestamp;
use tinkex_store::error::ServerError;
use tinkex_store::store::{AuditEvent, Record, Store};
use tinkex_store::user::{FIRST_KEY, KeyId, KeyRecord, UserId, UserRecord};
use tinkex_wire::codec::json;
use tinkex_wire::rest::{
    CreateKey, KeyCreated, KeyInfo, KeyList, KeyRole, UserInfo, UserLimits, UserList,
};
use tinkex_wire::{ApiKeyDetails, ApiKeyInfo, Secret};

use super::{Caller, RouteResult, empty, to_json};
use crate::keyring::hex_digest;
use crate::state::ServerState;

/// Maximum number of keys.
const MAX_KEYS: usize = 10_000;
/// Maximum lifetime of a key in seconds: ten years.
const MAX_LIFETIME: u64 = 315_360_000;

/// Describes the key of the request.
pub(super) fn current(caller: Caller<'_>) -> RouteResult {
    let principal = caller.principal;
    let user = principal.user.as_str();
    let details = ApiKeyDetails::new(user, format!("{user}@localhost"));
    let name = match caller.store().all().keys.get(&principal.key) {
        Some(record) => record.name.clone(),
        None => "the key of this server".to_owned(),
    };
    to_json(&ApiKeyInfo::new(0, user, details).note(name))
}

/// Revokes the key of the request.
pub(super) async fn revoke_current(caller: Caller<'_>) -> RouteResult {
    revoke(caller, &caller.principal.key).await
}

pub(super) fn list(caller: Caller<'_>) -> RouteResult {
    let store = caller.store();
    let mut stored: Vec<&KeyRecord> = store.all().keys.values().collect();
    stored.sort_by_key(|record| (record.created_at, record.id.clone()));
    let administrator = UserId::administrator();
    let first = caller
        .state
        .options
        .api_key
        .as_ref()
        .map(|_| KeyInfo::new(FIRST_KEY, FIRST_KEY, administrator.as_str(), KeyRole::Admin));
    to_json(&KeyList::new(first.into_iter().chain(stored.into_iter().map(to_wire)).collect()))
}

fn to_wire(record: &KeyRecord) -> KeyInfo {
    KeyInfo::new(&*record.id, &*record.name, record.user.as_str(), record.role)
        .created_at(Some(timestamp(record.created_at)))
        .expires_at(record.expires_at.map(timestamp))
}

/// Creates a key. The response is the only place where the key appears.
pub(super) async fn create(caller: Caller<'_>, body: &Bytes) -> RouteResult {
    let request: CreateKey = json::decode(body)?;
    let state = caller.state;
    if state.options.api_key.is_none() {
        let message = "this server accepts requests without a key; start it with a key first";
        return Err(ServerError::invalid(message).into());
    }
    let name = UserId::parse(&request.name)?;
    let user = request.user.as_deref().map(UserId::parse).transpose()?;
    let user = user.unwrap_or_else(|| name.clone());
    let lifetime = request.lifetime_seconds;
    if lifetime.is_some_and(|seconds| seconds == 0 || seconds > MAX_LIFETIME) {
        let message = format!("lifetime_seconds: expected 1 to {MAX_LIFETIME}");
        return Err(ServerError::invalid(message).into());
    }
    let key = new_key(state);
    let record = KeyRecord {
        id: format!("key-{}", &state.random.id()[..12]).into(),
        name: name.to_string(),
        user: user.clone(),
        role: request.role,
        digest: hex_digest(&key),
        created_at: state.clock.now(),
        expires_at: lifetime.map(|seconds| state.clock.in_seconds(seconds)),
    };
    let limits = request.limits;
    caller
        .change(|store| {
            check_new(store.all(), &record.name)?;
            let mut records =
                vec![Record::Key(record.clone()), store.audit(event("key.create", &record))];
            records.extend(limits.map(|limits| Record::User(UserRecord { id: user, limits })));
            Ok((records, ()))
        })
        .await?;
    state.keyring.set(&record);
    to_json(&KeyCreated::new(to_wire(&record), key))
}

/// Returns a key of 256 random bits.
fn new_key(state: &ServerState) -> Secret {
    let mut digest = Sha256::new();
    // Each UUID has 122 random bits of the operating system.
    for _ in 0..3 {
        digest.update(state.random.uuid().as_bytes());
    }
    let hex: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Secret::from(format!("tml-{hex}"))
}

fn check_new(store: &Store, name: &str) -> Result<(), ServerError> {
    if name == FIRST_KEY || store.keys.values().any(|key| key.name == name) {
        let message =
            format!("a key with the name {name} exists; choose another name, or rotate it");
        return Err(ServerError::Conflict(message));
    }
    if store.keys.len() >= MAX_KEYS {
        let message = format!("the server has {MAX_KEYS} keys, the maximum; revoke keys first");
        return Err(ServerError::invalid(message));
    }
    Ok(())
}

fn event(name: &'static str, record: &KeyRecord) -> AuditEvent {
    AuditEvent::new(name)
        .detail("key_id", &*record.id)
        .detail("key_name", &*record.name)
        .detail("key_user", record.user.as_str())
        .detail("key_role", record.role.name())
}

/// Finds a key by its id or name.
fn find<'a>(store: &'a Store, key: &str) -> Result<&'a KeyRecord, ServerError> {
    if key == FIRST_KEY {
        return Err(ServerError::invalid(
            "the first key of the server is in a file; remove the file and start the server again \
             to get another key",
        ));
    }
    let by_id = store.keys.get(&KeyId::from(key));
    let found = by_id.or_else(|| store.keys.values().find(|record| record.name == key));
    found.ok_or_else(|| ServerError::not_found(format!("key {key} does not exist")))
}

/// Revokes a key. Its requests and streams end before the response is sent.
pub(super) async fn revoke(caller: Caller<'_>, key: &str) -> RouteResult {
    let keyring = &caller.state.keyring;
    let mut ended = None;
    let written = caller
        .change(|store| {
            let record = find(store.all(), key)?.clone();
            let audit = store.audit(event("key.revoke", &record));
            let removed = Record::KeyRemoved { id: record.id.clone() };
            if ends_before_write(caller, &record) {
                keyring.revoke(&record.id);
                ended = Some(record.clone());
            }
            Ok((vec![removed, audit], record.id))
        })
        .await;
    if written.is_err()
        && let Some(record) = &ended
    {
        // Nothing was changed, so the key is still valid.
        keyring.set(record);
    }
    keyring.revoke(&written?);
    empty()
}

/// Returns whether a key ends before its removal or replacement is durable. If a client disconnects,
/// its handler is dropped before the write ends, but the write is not undone: a key that ended only
/// afterwards would stay valid until the next start. The key of the request itself ends afterwards,
/// so that the client gets a response.
fn ends_before_write(caller: Caller<'_>, record: &KeyRecord) -> bool {
    record.id != caller.principal.key
}

/// Replaces a key. Requests and streams with the old key end.
pub(super) async fn rotate(caller: Caller<'_>, key: &str) -> RouteResult {
    let new = new_key(caller.state);
    let keyring = &caller.state.keyring;
    let mut replaced = None;
    let written = caller
        .change(|store| {
            let old = find(store.all(), key)?.clone();
            if old.expires_at.is_some_and(|at| at <= store.all().clock.now()) {
                let message = format!("key {} has expired; create a new key", old.name);
                return Err(ServerError::invalid(message));
            }
            let record = KeyRecord { digest: hex_digest(&new), ..old.clone() };
            let audit = store.audit(event("key.rotate", &record));
            if ends_before_write(caller, &old) {
                keyring.set(&record);
                replaced = Some(old);
            }
            Ok((vec![Record::Key(record.clone()), audit], record))
        })
        .await;
    match (&written, &replaced) {
        // Nothing was changed, so the old key is still valid.
        (Err(_), Some(old)) => keyring.set(old),
        (Ok(record), None) => keyring.set(record),
        _ => {}
    }
    to_json(&KeyCreated::new(to_wire(&written?), new))
}

/// Lists the users: everybody who has a key, limits or objects.
pub(super) fn users(caller: Caller<'_>) -> RouteResult {
    let store = caller.store();
    let store = store.all();
    let mut keys: BTreeMap<&UserId, u64> = BTreeMap::new();
    for record in store.keys.values() {
        *keys.entry(&record.user).or_default() += 1;
    }
    let administrator = UserId::administrator();
    *keys.entry(&administrator).or_default() += u64::from(caller.state.options.api_key.is_some());
    let sessions = store.sessions.values().map(|entry| &entry.row.owner);
    let runs = store.runs.values().map(|entry| &entry.row.owner);
    let mut users: BTreeSet<&UserId> = keys.keys().copied().collect();
    users.extend(store.limits.keys().chain(sessions).chain(runs));
    let info = |user: &UserId| {
        let count = keys.get(user).copied().unwrap_or(0);
        UserInfo::new(
            user.as_str(),
            count,
            store.limits_of(user),
            use_of(caller.state, store, user),
        )
    };
    to_json(&UserList::new(users.into_iter().map(info).collect()))
}

/// Returns the current use by a user, in the units of the limits.
pub(super) fn use_of(state: &ServerState, store: &Store, user: &UserId) -> UserLimits {
    let usage = store.usage_of(user);
    let generations = state.inference.generations.of_user(user);
    UserLimits {
        samples: Some(usage.unfinished.samples + generations.samples),
        queued: Some(usage.unfinished.requests + generations.requests),
        tokens_per_day: Some(usage.tokens_today),
        bytes: Some(usage.bytes),
    }
}

/// Replaces the limits of a user.
pub(super) async fn set_limits(caller: Caller<'_>, user: &str, body: &Bytes) -> RouteResult {
    let limits: UserLimits = json::decode(body)?;
    let id = UserId::parse(user)?;
    caller
        .change(|store| {
            let shown = serde_json::to_value(limits).unwrap_or_default();
            let event = AuditEvent::new("user.limits").detail("user", id.as_str());
            let audit = store.audit(event.detail("limits", shown));
            Ok((vec![Record::User(UserRecord { id, limits }), audit], ()))
        })
        .await?;
    empty()
}
