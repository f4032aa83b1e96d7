//! `tinkex session`: lists, shows, searches and exports sessions.

use clap::{Subcommand, ValueEnum};
use clap_complete::ArgValueCandidates;
use serde::Serialize;
use serde_json::json;
use tinkex::rest::{
    AccessScope, ListSessions, SearchOwner, SearchSessions, SessionInfo, SessionStatus,
    SessionStatusFilter, SessionSummary,
};
use tinkex::{Metadata, SessionId};

use crate::args::whole_number;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::id_cache;
use crate::list::{self, ListColumn, PageArgs, ScopeArgs, SortKey, ViewArgs};
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
        #[command(flatten)]
        scope: ScopeArgs,
    },
    /// Show the runs, samplers and metadata of a session
    #[command(after_help = "Example:
  tinkex session info SESSION")]
    Info {
        /// Id of the session
        #[arg(add = ArgValueCandidates::new(id_cache::sessions))]
        session_id: SessionId,
        #[command(flatten)]
        scope: ScopeArgs,
    },
    /// Search sessions by project, metadata, name, owner or status
    #[command(after_help = "Examples:
  tinkex session search --status failed
  tinkex session search --metadata experiment=sft-a --project proj-1
  tinkex session search --name nightly --owner accessible

Columns: id, created, owner, project, status, checkpoints, storage, name.")]
    Search(Box<SearchArgs>),
    /// Download the trace of a session, for the Perfetto viewer
    #[command(after_help = "Examples:
  tinkex session export-trace SESSION
  tinkex session export-trace SESSION --output traces/one.pftrace
  tinkex session export-trace SESSION --url-only")]
    ExportTrace(trace::ExportTraceArgs),
    /// Assign a session to a project
    #[command(after_help = "Example:
  tinkex session assign-project SESSION proj-2")]
    AssignProject {
        /// Id of the session
        #[arg(add = ArgValueCandidates::new(id_cache::sessions))]
        session_id: SessionId,
        /// Id of the project
        project: String,
    },
}

/// Arguments of `tinkex session search`.
#[derive(Debug, clap::Args)]
pub(crate) struct SearchArgs {
    /// Only sessions of this project; repeatable
    #[arg(long = "project", value_name = "ID")]
    projects: Vec<String>,
    /// Only sessions with this metadata; repeatable
    #[arg(long, value_name = "NAME=VALUE", value_parser = name_value)]
    metadata: Vec<(String, String)>,
    /// Only sessions with this name
    #[arg(long)]
    name: Option<String>,
    /// Owner: own, accessible, or the URN of a user
    #[arg(long, value_name = "OWNER", default_value = "own")]
    owner: String,
    /// Only active, cancelled, failed or finished sessions; repeatable
    #[arg(long = "status", value_name = "STATUS", hide_possible_values = true)]
    statuses: Vec<SessionState>,
    /// Maximum number of rows; 0 lists all
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = whole_number::<u64>)]
    limit: u64,
    #[command(flatten)]
    view: ViewArgs,
}

/// Status of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SessionState {
    Active,
    Cancelled,
    Failed,
    Finished,
}

fn name_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

const ID_COLUMNS: [ListColumn<SessionId>; 1] = [ListColumn {
    name: "id",
    header: "Session ID",
    by_default: true,
    cell: |id, _| id.to_string(),
    key: |id| SortKey::text(id.as_str()),
}];

const COLUMNS: [ListColumn<SessionSummary>; 8] = [
    ListColumn {
        name: "id",
        header: "Session ID",
        by_default: true,
        cell: |session, _| session.session_id.to_string(),
        key: |session| SortKey::text(session.session_id.as_str()),
    },
    ListColumn {
        name: "created",
        header: "Created",
        by_default: true,
        cell: |session, now| format::relative_time(session.created_at, now),
        key: |session| SortKey::time(Some(session.created_at)),
    },
    ListColumn {
        name: "owner",
        header: "Owner",
        by_default: false,
        cell: |session, _| session.owner.clone(),
        key: |session| SortKey::text(&session.owner),
    },
    ListColumn {
        name: "project",
        header: "Project",
        by_default: true,
        cell: |session, _| session.project_id.clone(),
        key: |session| SortKey::text(&session.project_id),
    },
    ListColumn {
        name: "status",
        header: "Status",
        by_default: true,
        cell: |session, _| format::or_na(session.status.as_ref().map(status)),
        key: |session| {
            session.status.as_ref().map_or(SortKey::Missing, |known| SortKey::text(status(known)))
        },
    },
    ListColumn {
        name: "checkpoints",
        header: "Checkpoints",
        by_default: true,
        cell: |session, _| session.checkpoints_count.to_string(),
        key: |session| SortKey::size(Some(session.checkpoints_count)),
    },
    ListColumn {
        name: "storage",
        header: "Storage",
        by_default: true,
        cell: |session, _| format::or_na(session.checkpoint_storage_bytes.map(format::bytes)),
        key: |session| SortKey::size(session.checkpoint_storage_bytes),
    },
    ListColumn {
        name: "name",
        header: "Name",
        by_default: true,
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

/// Number of sessions per list request.
const BATCH: u64 = 100;
/// Number of sessions per search request, the maximum of the API.
const SEARCH_BATCH: u64 = 200;

pub(super) async fn run(
    context: &mut CommandContext<'_>,
    command: SessionCommand,
) -> Result<(), CommandError> {
    match command {
        SessionCommand::List { page, view, scope } => {
            list(context, page, &view, scope.access_scope).await
        }
        SessionCommand::Info { session_id, scope } => {
            let rest = context.client().await?.rest();
            let info = rest.get_session(session_id.clone(), scope.access_scope).await;
            let info = info.map_err(|error| {
                CommandError::from(error).context(&format!("cannot show session {session_id}"))
            })?;
            let report = SessionReport { session_id: &session_id, info: &info };
            context.table(&properties(&session_id, &info), &report)
        }
        SessionCommand::Search(args) => search(context, *args).await,
        SessionCommand::ExportTrace(args) => trace::run(context, args).await,
        SessionCommand::AssignProject { session_id, project } => {
            let rest = context.client().await?.rest();
            rest.assign_session_project(session_id.clone(), project.clone()).await?;
            let json = json!({ "session_id": session_id, "project_id": project });
            context.confirm_change(&format!("assigned {session_id} to project {project}"), &json)
        }
    }
}

async fn list(
    context: &mut CommandContext<'_>,
    page: PageArgs,
    view: &ViewArgs,
    access_scope: AccessScope,
) -> Result<(), CommandError> {
    let view = view.resolve(context, &ID_COLUMNS)?;
    let rest = context.client().await?.rest();
    let mut sessions: Vec<SessionId> = Vec::new();
    // The server does not report a total: a page with fewer rows than requested is the last.
    loop {
        let fetched = sessions.len() as u64;
        let limit = page.limit().map_or(BATCH, |limit| BATCH.min(limit - fetched));
        let request = ListSessions::default()
            .limit(limit)
            .offset(page.offset + fetched)
            .access_scope(access_scope);
        let more = rest.list_sessions(&request).await?.sessions;
        let is_last = (more.len() as u64) < limit;
        sessions.extend(more);
        if is_last || page.limit().is_some_and(|limit| sessions.len() as u64 >= limit) {
            break;
        }
    }
    let ids = sessions.iter().map(ToString::to_string);
    id_cache::store(&context.environment.variables, id_cache::IdKind::Session, ids);
    let shown = sessions.len();
    let title = list::title(shown, 0, "session", "sessions");
    view.print(context, title, sessions, |rows| json!({ "sessions": rows, "shown": shown }))
}

async fn search(context: &mut CommandContext<'_>, args: SearchArgs) -> Result<(), CommandError> {
    let view = args.view.resolve(context, &COLUMNS)?;
    let statuses = args.statuses.iter().map(|status| match status {
        SessionState::Active => SessionStatusFilter::Active,
        SessionState::Cancelled => SessionStatusFilter::Cancelled,
        SessionState::Failed => SessionStatusFilter::Failed,
        SessionState::Finished => SessionStatusFilter::ClientFinished { reasons: None },
    });
    let limit = if args.limit == 0 { u64::MAX } else { args.limit };
    let mut query = SearchSessions::default()
        .limit(limit.min(SEARCH_BATCH))
        .user_metadata(args.metadata.into_iter().collect::<Metadata>())
        .owner(match args.owner.as_str() {
            "own" => SearchOwner::Own,
            "accessible" => SearchOwner::Accessible,
            urn => SearchOwner::User { owner_urns: vec![urn.to_owned()] },
        });
    query.project_ids = (!args.projects.is_empty()).then_some(args.projects);
    query.display_name = args.name;
    query.statuses = Some(statuses.collect::<Vec<_>>()).filter(|statuses| !statuses.is_empty());
    let rest = context.client().await?.rest();
    let mut sessions: Vec<SessionSummary> = Vec::new();
    let more = loop {
        let page = rest.search_sessions(&query).await?;
        sessions.extend(page.sessions);
        let remaining = limit.saturating_sub(sessions.len() as u64);
        match page.next_cursor {
            Some(cursor) if remaining > 0 => {
                query.cursor = Some(cursor);
                query.limit = remaining.min(SEARCH_BATCH);
            }
            next => break next.is_some(),
        }
    };
    let shown = sessions.len();
    let mut title = list::title(shown, 0, "session", "sessions");
    if more {
        title += " (more not shown, use --limit to see more)";
    }
    view.print(
        context,
        title,
        sessions,
        |rows| json!({ "sessions": rows, "shown": shown, "more": more }),
    )
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
