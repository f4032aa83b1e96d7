//! Sessions, looked at from outside.

use clap::{Subcommand, ValueEnum};
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use serde_json::json;
use tinkex::rest::{
    AccessScope, ListSessions, SearchOwner, SearchSessions, SessionInfo, SessionStatus,
    SessionStatusFilter, SessionSummary,
};
use tinkex::{Metadata, SessionId, Timestamp};

use crate::error::CommandError;
use crate::format;
use crate::id_cache;
use crate::list::{self, ListColumn, PageArgs, SortKey, ViewArgs};
use crate::output::Shell;
use crate::table::Table;

use super::trace;

#[derive(Debug, Subcommand)]
pub(crate) enum SessionCommand {
    /// List sessions, newest first
    #[command(after_help = "Example:
  tinkex session list --limit 5")]
    List {
        #[command(flatten)]
        page: PageArgs,
        #[command(flatten)]
        view: ViewArgs,
        /// Whose sessions: owned or accessible
        #[arg(long, value_name = "SCOPE", value_parser = list::access_scope, default_value = "owned")]
        access_scope: AccessScope,
    },
    /// Show one session: its runs, its samplers, what was remembered with it
    #[command(after_help = "Example:
  tinkex session info SESSION")]
    Info {
        /// The session's id
        #[arg(add = ArgValueCandidates::new(id_cache::sessions))]
        session_id: SessionId,
        /// Whose sessions to look among: owned or accessible
        #[arg(long, value_name = "SCOPE", value_parser = list::access_scope, default_value = "owned")]
        access_scope: AccessScope,
    },
    /// Find sessions by what they are
    #[command(after_help = "Examples:
  tinkex session search --status failed
  tinkex session search --metadata experiment=sft-a --project proj-1
  tinkex session search --name nightly --owner accessible

Columns: id, created, owner, project, status, checkpoints, storage, name.")]
    Search(Box<SearchArgs>),
    /// Download a session's trace, for Perfetto
    #[command(after_help = "Examples:
  tinkex session export-trace SESSION
  tinkex session export-trace SESSION --output traces/one.pftrace
  tinkex session export-trace SESSION --url-only")]
    ExportTrace(trace::ExportTraceArgs),
    /// Move a session to a project
    #[command(after_help = "Example:
  tinkex session assign-project SESSION proj-2")]
    AssignProject {
        /// The session's id
        #[arg(add = ArgValueCandidates::new(id_cache::sessions))]
        session_id: SessionId,
        /// The project's id
        project: String,
    },
}

/// What to search for.
#[derive(Debug, clap::Args)]
pub(crate) struct SearchArgs {
    /// Those of this project; may be said more than once
    #[arg(long = "project", value_name = "ID")]
    projects: Vec<String>,
    /// Those with this remembered; may be said more than once
    #[arg(long, value_name = "NAME=TEXT", value_parser = pair)]
    metadata: Vec<(String, String)>,
    /// Those of this name
    #[arg(long)]
    name: Option<String>,
    /// Whose: own, accessible, or a user's URN
    #[arg(long, value_name = "WHO", default_value = "own")]
    owner: String,
    /// Those that are active, cancelled, failed or finished; may be said more than once
    #[arg(long = "status", value_name = "STATE", hide_possible_values = true)]
    statuses: Vec<SessionState>,
    /// How many at most; 0 for all
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: u64,
    #[command(flatten)]
    view: ViewArgs,
}

/// How a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SessionState {
    /// Still running
    Active,
    Cancelled,
    Failed,
    /// Ended by its client
    Finished,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("say NAME=TEXT".to_owned()),
    }
}

const IDS: [ListColumn<SessionId>; 1] = [ListColumn {
    name: "id",
    header: "Session ID",
    usual: true,
    cell: |id, _| id.to_string(),
    key: |id| SortKey::text(id.as_str()),
}];

const COLUMNS: [ListColumn<SessionSummary>; 8] = [
    ListColumn {
        name: "id",
        header: "Session ID",
        usual: true,
        cell: |session, _| session.session_id.to_string(),
        key: |session| SortKey::text(session.session_id.as_str()),
    },
    ListColumn {
        name: "created",
        header: "Created",
        usual: true,
        cell: |session, now| format::time(session.created_at, now),
        key: |session| SortKey::time(Some(session.created_at)),
    },
    ListColumn {
        name: "owner",
        header: "Owner",
        usual: false,
        cell: |session, _| session.owner.clone(),
        key: |session| SortKey::text(&session.owner),
    },
    ListColumn {
        name: "project",
        header: "Project",
        usual: true,
        cell: |session, _| session.project_id.clone(),
        key: |session| SortKey::text(&session.project_id),
    },
    ListColumn {
        name: "status",
        header: "Status",
        usual: true,
        cell: |session, _| format::or_missing(session.status.as_ref().map(status)),
        key: |session| {
            session.status.as_ref().map_or(SortKey::Missing, |it| SortKey::text(status(it)))
        },
    },
    ListColumn {
        name: "checkpoints",
        header: "Checkpoints",
        usual: true,
        cell: |session, _| session.checkpoints_count.to_string(),
        key: |session| SortKey::size(Some(session.checkpoints_count)),
    },
    ListColumn {
        name: "storage",
        header: "Storage",
        usual: true,
        cell: |session, _| format::or_missing(session.checkpoint_storage_bytes.map(format::bytes)),
        key: |session| SortKey::size(session.checkpoint_storage_bytes),
    },
    ListColumn {
        name: "name",
        header: "Name",
        usual: true,
        cell: |session, _| session.display_name.clone().unwrap_or_default(),
        key: |session| session.display_name.as_ref().map_or(SortKey::Missing, SortKey::text),
    },
];

fn status(status: &SessionStatus) -> &'static str {
    match status {
        SessionStatus::Active => "Active",
        SessionStatus::Cancelled { .. } => "Cancelled",
        SessionStatus::Failed { .. } => "Failed",
        SessionStatus::ClientFinished { .. } => "Finished",
        _ => "Other",
    }
}

/// How many sessions one request brings.
const BATCH: u64 = 100;
/// How many sessions one search brings, which has a limit.
const SEARCH_BATCH: u64 = 200;

pub(super) async fn run(
    shell: &mut Shell<'_>,
    command: SessionCommand,
) -> Result<(), CommandError> {
    match command {
        SessionCommand::List { page, view, access_scope } => {
            ids(shell, page, &view, access_scope).await
        }
        SessionCommand::Info { session_id, access_scope } => {
            let rest = shell.client().await?.rest();
            let info = rest.get_session(session_id.clone(), access_scope).await;
            let info = info.map_err(|why| {
                CommandError::from(why).during(&format!("no session {session_id}"))
            })?;
            shell.table(
                &properties(&session_id, &info),
                &SessionReport { session_id: &session_id, info: &info },
            )
        }
        SessionCommand::Search(what) => search(shell, *what).await,
        SessionCommand::ExportTrace(what) => trace::run(shell, what).await,
        SessionCommand::AssignProject { session_id, project } => {
            let rest = shell.client().await?.rest();
            rest.assign_session_project(session_id.clone(), project.clone()).await?;
            let json = json!({ "session_id": session_id, "project_id": project });
            shell.done(&format!("{session_id} belongs to {project} now"), &json)
        }
    }
}

async fn ids(
    shell: &mut Shell<'_>,
    page: PageArgs,
    view: &ViewArgs,
    access_scope: AccessScope,
) -> Result<(), CommandError> {
    let shown = view.of(shell, &IDS)?;
    let rest = shell.client().await?.rest();
    let mut sessions: Vec<SessionId> = Vec::new();
    // The server does not say how many there are: a short page is the last.
    loop {
        let have = sessions.len() as u64;
        let limit = page.limit().map_or(BATCH, |limit| BATCH.min(limit - have));
        let list = ListSessions::default()
            .limit(limit)
            .offset(page.offset + have)
            .access_scope(access_scope);
        let more = rest.list_sessions(&list).await?.sessions;
        let short = (more.len() as u64) < limit;
        sessions.extend(more);
        if short || page.limit().is_some_and(|most| sessions.len() as u64 >= most) {
            break;
        }
    }
    let ids = sessions.iter().map(ToString::to_string);
    id_cache::remember(&shell.environment.variables, id_cache::IdKind::Session, ids);
    shown.sort(&mut sessions);
    let count = sessions.len();
    let title = list::title(count, 0, "session", "sessions");
    let table = shown.table(&sessions, Timestamp::now()).title(title);
    shell.table(&table, &json!({ "sessions": sessions, "shown": count }))
}

async fn search(shell: &mut Shell<'_>, what: SearchArgs) -> Result<(), CommandError> {
    let shown = what.view.of(shell, &COLUMNS)?;
    let states = what.statuses.iter().map(|state| match state {
        SessionState::Active => SessionStatusFilter::Active,
        SessionState::Cancelled => SessionStatusFilter::Cancelled,
        SessionState::Failed => SessionStatusFilter::Failed,
        SessionState::Finished => SessionStatusFilter::ClientFinished { reasons: None },
    });
    let most = if what.limit == 0 { u64::MAX } else { what.limit };
    let mut query = SearchSessions::default()
        .limit(most.min(SEARCH_BATCH))
        .user_metadata(what.metadata.into_iter().collect::<Metadata>())
        .owner(match what.owner.as_str() {
            "own" => SearchOwner::Own,
            "accessible" => SearchOwner::Accessible,
            urn => SearchOwner::User { owner_urns: vec![urn.to_owned()] },
        });
    query.project_ids = (!what.projects.is_empty()).then_some(what.projects);
    query.display_name = what.name;
    query.statuses = Some(states.collect::<Vec<_>>()).filter(|states| !states.is_empty());
    let rest = shell.client().await?.rest();
    let mut sessions: Vec<SessionSummary> = Vec::new();
    let more = loop {
        let page = rest.search_sessions(&query).await?;
        sessions.extend(page.sessions);
        let left = most.saturating_sub(sessions.len() as u64);
        match page.next_cursor {
            Some(cursor) if left > 0 => {
                query.cursor = Some(cursor);
                query.limit = left.min(SEARCH_BATCH);
            }
            next => break next.is_some(),
        }
    };
    shown.sort(&mut sessions);
    let count = sessions.len();
    let mut title = list::title(count, 0, "session", "sessions");
    if more {
        title += " (more not shown, use --limit to see more)";
    }
    let table = shown.table(&sessions, Timestamp::now()).title(title);
    shell.table(&table, &json!({ "sessions": sessions, "shown": count, "more": more }))
}

#[derive(Serialize)]
struct SessionReport<'a> {
    session_id: &'a SessionId,
    #[serde(flatten)]
    info: &'a SessionInfo,
}

fn properties(id: &SessionId, info: &SessionInfo) -> Table {
    let mut table = Table::of_properties().title(format!("Session: {id}"));
    table.property("Session ID", id.as_str());
    if let Some(name) = &info.display_name {
        table.property("Name", name);
    }
    table.property("Training Runs", info.training_run_ids.len().to_string());
    for run in &info.training_run_ids {
        table.property("  - Run", run.as_str());
    }
    table.property("Samplers", info.sampler_ids.len().to_string());
    for sampler in &info.sampler_ids {
        table.property("  - Sampler", sampler.as_str());
    }
    table.metadata(info.user_metadata.as_ref());
    table
}
