//! Lists: which part of them, which columns, in which order.

use std::cmp::Ordering;

use clap::Args as Group;
use tinkex::{Error, Timestamp};

use crate::error::CommandError;
use crate::output::Shell;
use crate::progress::{Progress, ProgressUnit};
use crate::table::Table;

/// Which part of a list.
#[derive(Clone, Copy, Debug, Group)]
pub(crate) struct PageArgs {
    /// How many at most; 0 for all
    #[arg(long, value_name = "N", default_value_t = 20, allow_negative_numbers = true)]
    limit: i64,
    /// How many to skip
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) offset: u64,
}

impl PageArgs {
    /// Everything.
    pub(crate) const ALL: Self = Self { limit: 0, offset: 0 };

    /// How many at most; all if `None`.
    pub(crate) fn limit(&self) -> Option<u64> {
        u64::try_from(self.limit).ok().filter(|limit| *limit > 0)
    }
}

/// How a list is shown.
#[derive(Clone, Debug, Default, Group)]
pub(crate) struct ViewArgs {
    /// Which columns, in this order, with commas
    #[arg(short = 'c', long, value_name = "LIST")]
    columns: Option<String>,
    /// Order by this column; `-NAME` the other way round
    #[arg(long, value_name = "NAME", allow_hyphen_values = true)]
    sort: Option<String>,
    /// Never cut cells, even if the terminal is too narrow
    #[arg(long)]
    wide: bool,
}

/// A column of a list of `T`.
pub(crate) struct ListColumn<T> {
    /// What it is called on the command line.
    pub(crate) name: &'static str,
    pub(crate) header: &'static str,
    /// Whether it is shown if nobody asks for columns.
    pub(crate) usual: bool,
    pub(crate) cell: fn(&T, Timestamp) -> String,
    pub(crate) key: fn(&T) -> SortKey,
}

/// What rows are ordered by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SortKey {
    Missing,
    Number(i64),
    Text(String),
}

impl SortKey {
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    pub(crate) fn time(time: Option<Timestamp>) -> Self {
        time.map_or(Self::Missing, |time| Self::Number(time.unix_micros()))
    }

    pub(crate) fn size(bytes: Option<u64>) -> Self {
        bytes.map_or(Self::Missing, |bytes| Self::Number(i64::try_from(bytes).unwrap_or(i64::MAX)))
    }
}

/// A view that makes sense for a list.
pub(crate) struct ListView<'c, T> {
    columns: Vec<&'c ListColumn<T>>,
    sort: Option<(&'c ListColumn<T>, bool)>,
}

impl ViewArgs {
    /// Looks up what was asked for, before anything is requested.
    pub(crate) fn of<'c, T>(
        &self,
        shell: &mut Shell<'_>,
        all: &'c [ListColumn<T>],
    ) -> Result<ListView<'c, T>, CommandError> {
        let find = |name: &str| {
            all.iter().find(|column| column.name == name.trim()).ok_or_else(|| {
                let names: Vec<_> = all.iter().map(|column| column.name).collect();
                CommandError::usage(format!("there is no column {name:?}"))
                    .hint(format!("there are {}", names.join(", ")))
            })
        };
        let columns = match &self.columns {
            Some(names) => names.split(',').map(find).collect::<Result<_, _>>()?,
            None => all.iter().filter(|column| column.usual).collect(),
        };
        let sort = match self.sort.as_deref() {
            Some(name) => {
                let (name, down) = name.strip_prefix('-').map_or((name, false), |n| (n, true));
                Some((find(name)?, down))
            }
            None => None,
        };
        if self.wide {
            shell.widen();
        }
        Ok(ListView { columns, sort })
    }
}

impl<T> ListView<'_, T> {
    /// Puts rows in the order asked for; those that are equal stay as they were.
    pub(crate) fn sort(&self, rows: &mut [T]) {
        if let Some((column, down)) = self.sort {
            rows.sort_by(|a, b| {
                let order: Ordering = (column.key)(a).cmp(&(column.key)(b));
                if down { order.reverse() } else { order }
            });
        }
    }

    pub(crate) fn table(&self, rows: &[T], now: Timestamp) -> Table {
        let mut table = Table::new(self.columns.iter().map(|column| column.header));
        for row in rows {
            table.row(self.columns.iter().map(|column| (column.cell)(row, now)));
        }
        table
    }
}

/// What was found of a list.
pub(crate) struct FetchedRows<T> {
    pub(crate) rows: Vec<T>,
    /// How many there are, found or not.
    pub(crate) total: u64,
}

/// Pages until there are as many as asked for, or no more. `what` is the plural.
pub(crate) async fn pages<T, F>(
    shell: &mut Shell<'_>,
    what: &str,
    page: PageArgs,
    batch: u64,
    fetch: impl Fn(u64, u64) -> F,
) -> Result<FetchedRows<T>, CommandError>
where
    F: Future<Output = Result<(Vec<T>, Option<u64>), Error>>,
{
    let most = page.limit().unwrap_or(u64::MAX);
    let (mut rows, total) = fetch(page.offset, batch.min(most)).await?;
    let total = total.unwrap_or(page.offset + rows.len() as u64);
    let target = most.min(total.saturating_sub(page.offset));
    let label = match page.limit() {
        Some(limit) => format!("Fetching {limit} {what}"),
        None => format!("Fetching all {what}"),
    };
    let mut bar = Progress::new(shell, label, ProgressUnit::Things, Some(target));
    while (rows.len() as u64) < target {
        bar.set(shell, rows.len() as u64, Some(target));
        let limit = batch.min(target - rows.len() as u64);
        let next = fetch(page.offset + rows.len() as u64, limit).await;
        let (more, _) = match next {
            Ok(page) => page,
            Err(error) => {
                bar.clear(shell);
                return Err(error.into());
            }
        };
        let short = (more.len() as u64) < limit;
        rows.extend(more);
        // Whatever the total claims.
        if short {
            break;
        }
    }
    bar.clear(shell);
    Ok(FetchedRows { rows, total })
}

/// `3 things (2 more not shown, …)`, as titles of lists have it.
pub(crate) fn title(shown: usize, total: u64, one: &str, many: &str) -> String {
    let mut title = match shown {
        0 => format!("No {many} found"),
        1 => format!("1 {one}"),
        _ => format!("{shown} {many}"),
    };
    let more = total.saturating_sub(shown as u64);
    if more > 0 {
        title += &format!(" ({more} more not shown, use --limit to see more)");
    }
    title
}

/// Whose things: the value of `--access-scope`.
pub(crate) fn access_scope(text: &str) -> Result<tinkex::rest::AccessScope, String> {
    match text {
        "owned" => Ok(tinkex::rest::AccessScope::Owned),
        "accessible" => Ok(tinkex::rest::AccessScope::Accessible),
        _ => Err("say owned or accessible".to_owned()),
    }
}
