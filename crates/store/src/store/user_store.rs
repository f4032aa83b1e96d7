//! [`UserStore`]: the records that a user may see.

use std::ops::{Deref, DerefMut};

use tinkex_wire::rest::KeyRole;
use tinkex_wire::{JsonObject, ModelId, RequestId, SamplerId, SessionId, TinkerPath};

use super::{
    AuditRecord, CheckpointRecord, ModelRunRecord, RequestEntry, SamplerRecord, SessionEntry,
    SessionRecord, Store, Tracked,
};
use crate::error::ServerError;
use crate::record::Record;
use crate::user::Principal;

/// The store as one principal sees it: objects of other users do not exist, except for shared runs
/// and published checkpoints, which can be read.
///
/// Handlers of requests look objects up through this type, so that no handler can forget the check.
/// `S` is a reference to the store, or a guard of its lock.
pub struct UserStore<'a, S> {
    store: S,
    principal: &'a Principal,
}

impl<'a, S: Deref<Target = Store>> UserStore<'a, S> {
    pub fn new(store: S, principal: &'a Principal) -> Self {
        Self { store, principal }
    }

    /// Returns the records of all users. The caller must not show them, and must not change
    /// records that it has not looked up for this principal.
    pub fn all(&self) -> &Store {
        &self.store
    }

    /// Returns the store, for an object that was looked up for this principal.
    pub fn into_inner(self) -> S {
        self.store
    }

    pub fn principal(&self) -> &'a Principal {
        self.principal
    }

    /// Returns the sessions of the user.
    pub fn sessions(&self) -> impl Iterator<Item = &SessionRecord> {
        let all = self.store.sessions.values().map(|entry| &entry.row);
        all.filter(|row| self.principal.controls(&row.owner))
    }

    /// Returns a session of the user.
    ///
    /// # Errors
    /// [`ServerError::NotFound`] if there is no such session.
    pub fn session(&self, id: &SessionId) -> Result<&SessionEntry, ServerError> {
        let entry = self.store.sessions.get(id);
        let own = entry.filter(|entry| self.principal.controls(&entry.row.owner));
        own.ok_or_else(|| ServerError::no_session(id))
    }

    /// Returns a session of the user that is open.
    ///
    /// # Errors
    /// [`ServerError::NotFound`] if there is no such session, [`ServerError::Forbidden`] if it has
    /// ended.
    pub fn open_session(&self, id: &SessionId) -> Result<&SessionRecord, ServerError> {
        let row = &self.session(id)?.row;
        if row.end.is_some() {
            let message = format!("session {id} has ended; create a new session");
            return Err(ServerError::forbidden(message));
        }
        Ok(row)
    }

    /// Returns whether the principal may read a run and use its checkpoints.
    pub fn can_read(&self, run: &ModelRunRecord) -> bool {
        self.principal.controls(&run.owner) || run.shared_with.includes(&self.principal.user)
    }

    /// Returns the runs that the principal may read.
    pub fn runs(&self) -> impl Iterator<Item = &Tracked<ModelRunRecord>> {
        self.store.runs.values().filter(|entry| self.can_read(&entry.row))
    }

    /// Returns a run that the principal may read.
    ///
    /// # Errors
    /// [`ServerError::NotFound`] if there is no such run.
    pub fn run(&self, id: &ModelId) -> Result<&Tracked<ModelRunRecord>, ServerError> {
        let entry = self.store.runs.get(id).filter(|entry| self.can_read(&entry.row));
        entry.ok_or_else(|| ServerError::no_run(id))
    }

    /// Returns a run that the principal may change.
    ///
    /// # Errors
    /// [`ServerError::NotFound`] if there is no such run, [`ServerError::Forbidden`] if it is
    /// shared with the user but belongs to another user.
    pub fn own_run(&self, id: &ModelId) -> Result<&Tracked<ModelRunRecord>, ServerError> {
        let entry = self.run(id)?;
        if self.principal.controls(&entry.row.owner) {
            return Ok(entry);
        }
        Err(ServerError::forbidden(format!(
            "training run {id} is shared with you and belongs to {}; only its owner and administrators \
             can change it",
            entry.row.owner
        )))
    }

    /// Returns the checkpoints of the runs that the principal may read.
    pub fn checkpoints(&self) -> impl Iterator<Item = &CheckpointRecord> {
        let all = self.store.checkpoints.values().map(|entry| &entry.row);
        all.filter(|row| self.run(row.path.run()).is_ok())
    }

    /// Returns a checkpoint that has not expired and that the principal may read: of a run that the
    /// principal may read, or published.
    ///
    /// # Errors
    /// [`ServerError::NotFound`] if there is no such checkpoint.
    pub fn checkpoint(&self, path: &TinkerPath) -> Result<&CheckpointRecord, ServerError> {
        let row = self.store.checkpoint(path).map(|entry| &entry.row);
        let readable = row.filter(|row| row.public || self.run(path.run()).is_ok());
        readable.ok_or_else(|| ServerError::no_checkpoint(path))
    }

    /// Returns a checkpoint that has not expired and that the principal may change.
    ///
    /// # Errors
    /// [`ServerError::NotFound`] if there is no such checkpoint, [`ServerError::Forbidden`] if the
    /// principal may only read it.
    pub fn own_checkpoint(&self, path: &TinkerPath) -> Result<&CheckpointRecord, ServerError> {
        let row = self.checkpoint(path)?;
        let owner = self.store.runs.get(path.run()).map(|entry| &entry.row.owner);
        if owner.is_some_and(|owner| self.principal.controls(owner)) {
            return Ok(row);
        }
        let message = format!(
            "checkpoint {path} belongs to another user; only its owner and administrators can change it"
        );
        Err(ServerError::forbidden(message))
    }

    /// Returns a sampling session of the user, which may have ended.
    ///
    /// # Errors
    /// [`ServerError::NotFound`] if there is no such sampling session.
    pub fn sampler(&self, id: &SamplerId) -> Result<&SamplerRecord, ServerError> {
        let row = self.store.samplers.get(id).map(|entry| &entry.row);
        let own = row.filter(|row| self.session(&row.session).is_ok());
        own.ok_or_else(|| ServerError::no_sampling_session(id))
    }

    /// Returns a sampling session of the user that can be sampled from.
    ///
    /// # Errors
    /// If there is no such sampling session, or it has ended.
    pub fn open_sampler(&self, id: &SamplerId) -> Result<&SamplerRecord, ServerError> {
        self.sampler(id)?;
        self.store.open_sampler(id)
    }

    /// Returns a request of the user.
    pub fn request(&self, id: &RequestId) -> Option<&RequestEntry> {
        self.store.requests.get(id).filter(|entry| self.principal.controls(&entry.owner))
    }

    /// Returns the record of an action of the principal.
    pub fn audit(&self, event: AuditEvent) -> Record {
        let AuditEvent { name, run, path, details } = event;
        Record::Audit(AuditRecord {
            number: self.store.audit.back().map_or(1, |last| last.number + 1),
            at: self.store.clock.now(),
            user: self.principal.user.clone(),
            key: self.principal.key.clone(),
            event: name.to_owned(),
            run,
            path,
            details,
        })
    }

    /// Returns the entries of the audit log that the principal may see: all for an administrator,
    /// the user's own actions otherwise.
    pub fn audit_log(&self) -> impl Iterator<Item = &AuditRecord> {
        let sees_all = self.principal.role == KeyRole::Admin;
        self.store.audit.iter().filter(move |entry| sees_all || entry.user == self.principal.user)
    }
}

impl<S: DerefMut<Target = Store>> UserStore<'_, S> {
    /// Returns the records of all users for a change; see [`all`](Self::all).
    pub fn all_mut(&mut self) -> &mut Store {
        &mut self.store
    }
}

/// An action for the audit log.
#[derive(Clone, Debug)]
pub struct AuditEvent {
    /// Name of the event, such as `run.delete`.
    pub name: &'static str,
    pub run: Option<ModelId>,
    pub path: Option<TinkerPath>,
    pub details: JsonObject,
}

impl AuditEvent {
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self { name, run: None, path: None, details: JsonObject::new() }
    }

    /// Returns an event that concerns a run.
    #[must_use]
    pub fn of_run(name: &'static str, run: &ModelId) -> Self {
        Self { run: Some(run.clone()), ..Self::new(name) }
    }

    /// Returns an event that concerns a checkpoint.
    #[must_use]
    pub fn of_checkpoint(name: &'static str, path: &TinkerPath) -> Self {
        Self { path: Some(path.clone()), ..Self::of_run(name, path.run()) }
    }

    /// Adds a detail.
    #[must_use]
    pub fn detail(mut self, name: &str, value: impl Into<serde_json::Value>) -> Self {
        self.details.insert(name.to_owned(), value.into());
        self
    }
}
