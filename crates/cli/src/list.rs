//! List commands: paging, columns, sorting and output.

use std::cmp::Ordering;

use clap::Args as ArgGroup;
use serde::Serialize;
use tinkex::rest::AccessScope;
use tinkex::{Error, Timestamp};

use crate::args::whole_number;
use crate::context::CommandContext;
use crate::error::CommandError;
use crate::format;
use crate::progress::{Progress, ProgressUnit};
use crate::table::{Table, TableCell};

/// Paging options of a list command.
#[derive(Clone, Copy, Debug, ArgGroup)]
pub(crate) struct PageArgs {
    /// Maximum number of rows; 0 lists all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        allow_negative_numbers = true,
        value_parser = whole_number::<i64>
    )]
    limit: i64,
    /// Number of rows to skip
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole_number::<u64>)]
    pub(crate) offset: u64,
}

impl PageArgs {
    /// Selects all rows.
    pub(crate) const ALL: Self = Self { limit: 0, offset: 0 };

    /// Returns the maximum number of rows; `None` is unlimited.
    pub(crate) fn limit(&self) -> Option<u64> {
        u64::try_from(self.limit).ok().filter(|limit| *limit > 0)
    }
}

/// Column and sorting options of a list command.
#[derive(Clone, Debug, Default, ArgGroup)]
pub(crate) struct ViewArgs {
    /// Columns to show, separated by commas
    #[arg(short = 'c', long, value_name = "LIST")]
    columns: Option<String>,
    /// Sort by this column; -NAME sorts in descending order
    #[arg(long, value_name = "NAME", allow_hyphen_values = true)]
    sort: Option<String>,
    /// Do not truncate cells to the width of the terminal
    #[arg(long)]
    wide: bool,
}

/// Column of a list of `T`.
pub(crate) struct ListColumn<T> {
    /// Name on the command line.
    pub(crate) name: &'static str,
    pub(crate) header: &'static str,
    /// Whether the column is shown without `--columns`.
    pub(crate) by_default: bool,
    /// Returns the text of the cell. The second argument is the current time, for relative times.
    pub(crate) cell: fn(&T, Timestamp) -> String,
    /// Returns the value that `--sort` compares.
    pub(crate) key: fn(&T) -> SortKey,
}

/// Value to sort rows by. Missing values come first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SortKey {
    Missing,
    Flag(bool),
    Number(i64),
    /// Microseconds since the Unix epoch.
    Time(i64),
    /// Bytes.
    Size(u64),
    Text(String),
}

impl SortKey {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    pub(crate) fn time(time: Option<Timestamp>) -> Self {
        time.map_or(Self::Missing, |time| Self::Time(time.unix_micros()))
    }

    pub(crate) fn size(bytes: Option<u64>) -> Self {
        bytes.map_or(Self::Missing, Self::Size)
    }

    /// Returns the cell of a value that the table shows as `text`.
    fn cell(self, text: String) -> TableCell {
        match self {
            Self::Missing if format::is_placeholder(&text) => TableCell::with_value(text, ""),
            Self::Flag(flag) => TableCell::with_value(text, flag.to_string()),
            Self::Number(number) => TableCell::with_value(text, number.to_string()),
            Self::Size(bytes) => TableCell::with_value(text, bytes.to_string()),
            Self::Time(micros) => match Timestamp::from_unix_micros(micros) {
                Ok(time) => TableCell::with_value(text, time.to_string()),
                Err(_) => text.into(),
            },
            Self::Missing | Self::Text(_) => text.into(),
        }
    }
}

/// Columns and sort order of a list, checked against the columns it has.
pub(crate) struct ListView<'c, T> {
    columns: Vec<&'c ListColumn<T>>,
    /// Whether `--columns` selects the columns.
    is_explicit: bool,
    sort: Option<(&'c ListColumn<T>, bool)>,
}

impl ViewArgs {
    /// Looks up the requested columns. Call it before any request, so that an unknown column is
    /// reported without delay.
    pub(crate) fn resolve<'c, T>(
        &self,
        context: &mut CommandContext<'_>,
        all: &'c [ListColumn<T>],
    ) -> Result<ListView<'c, T>, CommandError> {
        let find = |name: &str| {
            all.iter().find(|column| column.name == name.trim()).ok_or_else(|| {
                let names: Vec<_> = all.iter().map(|column| column.name).collect();
                CommandError::usage(format!("unknown column `{name}`"))
                    .hint(format!("Choose from: {}.", names.join(", ")))
            })
        };
        let columns = match &self.columns {
            Some(names) => names.split(',').map(find).collect::<Result<_, _>>()?,
            None => all.iter().filter(|column| column.by_default).collect(),
        };
        let sort = match self.sort.as_deref() {
            Some(name) => {
                let (name, descending) =
                    name.strip_prefix('-').map_or((name, false), |n| (n, true));
                Some((find(name)?, descending))
            }
            None => None,
        };
        if self.wide {
            context.widen();
        }
        Ok(ListView { columns, is_explicit: self.columns.is_some(), sort })
    }
}

impl<T> ListView<'_, T> {
    /// Hides a column that has no values, unless `--columns` selects it.
    pub(crate) fn hide(&mut self, name: &str) {
        if !self.is_explicit {
            self.columns.retain(|column| column.name != name);
        }
    }

    /// Sorts the rows. The sort is stable.
    fn sort(&self, rows: &mut [T]) {
        if let Some((column, descending)) = self.sort {
            rows.sort_by(|a, b| {
                let order: Ordering = (column.key)(a).cmp(&(column.key)(b));
                if descending { order.reverse() } else { order }
            });
        }
    }

    /// Sorts the rows and prints them as a table, or as the JSON document that `document` makes of
    /// the sorted rows.
    pub(crate) fn print<D: Serialize>(
        &self,
        context: &mut CommandContext<'_>,
        title: impl Into<Option<String>>,
        mut rows: Vec<T>,
        document: impl FnOnce(Vec<T>) -> D,
    ) -> Result<(), CommandError> {
        self.sort(&mut rows);
        // A truncated tinker:// path cannot be copied into another command.
        let mut table = self.table(&rows, Timestamp::now()).untruncated("Path").shorten_ids();
        if let Some(title) = title.into() {
            table = table.title(title);
        }
        context.table(&table, &document(rows))
    }

    fn table(&self, rows: &[T], now: Timestamp) -> Table {
        let mut table = Table::new(self.columns.iter().map(|column| column.header));
        for row in rows {
            let cell = |column: &&ListColumn<T>| (column.key)(row).cell((column.cell)(row, now));
            table.row(self.columns.iter().map(cell));
        }
        table
    }
}

/// Rows that were fetched from the server.
pub(crate) struct FetchedRows<T> {
    pub(crate) rows: Vec<T>,
    /// Number of rows that exist, fetched or not.
    pub(crate) total: u64,
}

/// Fetches pages until `page.limit` rows or all rows have been fetched.
///
/// `noun` is the plural of what is listed. `fetch(offset, limit)` requests one page of at most
/// `batch` rows, and returns the rows and the total number if the server reports it.
pub(crate) async fn fetch_pages<T, F>(
    context: &CommandContext<'_>,
    noun: &str,
    page: PageArgs,
    batch: u64,
    fetch: impl Fn(u64, u64) -> F,
) -> Result<FetchedRows<T>, CommandError>
where
    F: Future<Output = Result<(Vec<T>, Option<u64>), Error>>,
{
    let limit = page.limit().unwrap_or(u64::MAX);
    let (mut rows, total) = fetch(page.offset, batch.min(limit)).await?;
    let total = total.unwrap_or(page.offset + rows.len() as u64);
    let target = limit.min(total.saturating_sub(page.offset));
    let label = match page.limit() {
        Some(limit) => format!("Fetching {limit} {noun}"),
        None => format!("Fetching all {noun}"),
    };
    let progress = Progress::new(context, label, ProgressUnit::Items, Some(target));
    while (rows.len() as u64) < target {
        progress.set_position(rows.len() as u64);
        let limit = batch.min(target - rows.len() as u64);
        let (more, _) = fetch(page.offset + rows.len() as u64, limit).await?;
        let is_last = (more.len() as u64) < limit;
        rows.extend(more);
        // The reported total may be too high, for example if rows were deleted meanwhile.
        if is_last {
            break;
        }
    }
    Ok(FetchedRows { rows, total })
}

/// Returns the title of a list: `3 runs (2 more not shown, …)`. `total` is the number of existing
/// items; 0 if it is unknown.
pub(crate) fn title(shown: usize, total: u64, singular: &str, plural: &str) -> String {
    let mut title = match shown {
        0 => format!("No {plural} found"),
        1 => format!("1 {singular}"),
        _ => format!("{shown} {plural}"),
    };
    let more = total.saturating_sub(shown as u64);
    if more > 0 {
        title += &format!(" ({more} more not shown, use --limit to see more)");
    }
    title
}

/// Option for the owner of listed resources.
#[derive(Clone, Copy, Debug, ArgGroup)]
pub(crate) struct ScopeArgs {
    /// Resources to include: owned or accessible
    #[arg(long, value_name = "SCOPE", value_parser = access_scope, default_value = "owned")]
    pub(crate) access_scope: AccessScope,
}

fn access_scope(text: &str) -> Result<AccessScope, String> {
    match text {
        "owned" => Ok(AccessScope::Owned),
        "accessible" => Ok(AccessScope::Accessible),
        _ => Err("expected owned or accessible".to_owned()),
    }
}
