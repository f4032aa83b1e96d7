//! The table of results and their targets.

use std::fmt::Write as _;

use crate::compare::Three;

/// Target for the figure of the client.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bar {
    /// At most Python's figure divided by this.
    OfPeer(f64),
    /// At least Python's figure times this.
    TimesPeer(f64),
    /// At most the floor's figure times this.
    OfFloor(f64),
    AtMost(f64, &'static str),
    AtLeast(f64, &'static str),
}

pub(crate) struct Row {
    name: String,
    figures: [String; 3],
    /// Returns the ratio, the target, and whether it was met.
    verdicts: Vec<(String, String, bool)>,
}

impl Row {
    pub(crate) fn new(
        name: &str,
        figures: Three<f64>,
        print: impl Fn(f64) -> String,
        bars: &[Bar],
    ) -> Self {
        let cell = |figure: Option<f64>| figure.map_or_else(|| "–".to_owned(), &print);
        let Three { python, floor, ours } = figures;
        Self {
            name: name.to_owned(),
            figures: [cell(python), cell(floor), cell(Some(ours))],
            verdicts: bars.iter().map(|bar| bar.judge(figures)).collect(),
        }
    }

    pub(crate) fn met(&self) -> bool {
        self.verdicts.iter().all(|(.., met)| *met)
    }
}

impl Bar {
    /// A missing figure never meets its target.
    fn judge(self, figures: Three<f64>) -> (String, String, bool) {
        let ours = figures.ours;
        let python = figures.python.unwrap_or(f64::NAN);
        let floor = figures.floor.unwrap_or(f64::NAN);
        match self {
            Self::OfPeer(bar) => {
                let ratio = python / ours;
                (format!("1/{ratio:.1} of Python"), format!("≤ 1/{bar:.0}"), ratio >= bar)
            }
            Self::TimesPeer(bar) => {
                let ratio = ours / python;
                (format!("{ratio:.1}× Python"), format!("≥ {bar:.0}×"), ratio >= bar)
            }
            Self::OfFloor(bar) => {
                let ratio = ours / floor;
                (format!("{ratio:.2}× the floor"), format!("≤ {bar:.0}×"), ratio <= bar)
            }
            Self::AtMost(bar, name) => (String::new(), format!("≤ {name}"), ours <= bar),
            Self::AtLeast(bar, name) => (String::new(), name.to_owned(), ours >= bar),
        }
    }
}

/// Formats the table as in `docs/performance.md`.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = String::from(
        "| | Python SDK 0.36 | floor | tinkex | ratio | bar | |\n|---|---|---|---|---|---|---|\n",
    );
    for Row { name, figures: [python, floor, ours], verdicts } in rows {
        for (i, (ratio, bar, met)) in verdicts.iter().enumerate() {
            let verdict = if *met { "met" } else { "MISSED" };
            let _ = if i == 0 {
                writeln!(
                    table,
                    "| {name} | {python} | {floor} | {ours} | {ratio} | {bar} | {verdict} |"
                )
            } else {
                writeln!(table, "| | | | | {ratio} | {bar} | {verdict} |")
            };
        }
    }
    table
}

pub(crate) fn micros(seconds: f64) -> String {
    format!("{:.1} µs", seconds * 1e6)
}

pub(crate) fn millis(seconds: f64) -> String {
    format!("{:.2} ms", seconds * 1e3)
}
