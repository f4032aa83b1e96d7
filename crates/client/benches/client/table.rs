//! The table of results and their targets.

use std::fmt::Write as _;

use crate::compare::PerContender;

/// Target for the figure of the client.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// At most Python's figure divided by this number.
    OfPeer(f64),
    /// At least Python's figure times this number.
    TimesPeer(f64),
    /// At most the floor's figure times this number.
    OfFloor(f64),
    /// At most the figure of one service client, which is in the column of the floor, times this
    /// number.
    OfOneService(f64),
    /// At most this number; the string is its printed form.
    AtMost(f64, &'static str),
    /// At least this number; the string is its printed form.
    AtLeast(f64, &'static str),
}

/// Row of the table: one measurement with its targets.
pub(crate) struct Row {
    name: String,
    figures: [String; 3],
    /// Ratio, target, and whether the target was met.
    results: Vec<(String, String, bool)>,
}

impl Row {
    pub(crate) fn new(
        name: &str,
        figures: PerContender<f64>,
        print: impl Fn(f64) -> String,
        targets: &[Target],
    ) -> Self {
        let cell = |figure: Option<f64>| figure.map_or_else(|| "–".to_owned(), &print);
        let PerContender { python, floor, ours } = figures;
        Self {
            name: name.to_owned(),
            figures: [cell(python), cell(floor), cell(Some(ours))],
            results: targets.iter().map(|target| target.evaluate(figures)).collect(),
        }
    }

    pub(crate) fn met(&self) -> bool {
        self.results.iter().all(|(.., met)| *met)
    }
}

impl Target {
    /// Returns the ratio, the target, and whether the target was met. A missing figure never meets
    /// its target.
    fn evaluate(self, figures: PerContender<f64>) -> (String, String, bool) {
        let ours = figures.ours;
        let python = figures.python.unwrap_or(f64::NAN);
        let floor = figures.floor.unwrap_or(f64::NAN);
        match self {
            Self::OfPeer(target) => {
                let ratio = python / ours;
                (format!("1/{ratio:.1} of Python"), format!("≤ 1/{target:.0}"), ratio >= target)
            }
            Self::TimesPeer(target) => {
                let ratio = ours / python;
                (format!("{ratio:.1}× Python"), format!("≥ {target:.0}×"), ratio >= target)
            }
            Self::OfFloor(target) => {
                let ratio = ours / floor;
                (format!("{ratio:.2}× the floor"), format!("≤ {target}×"), ratio <= target)
            }
            Self::OfOneService(target) => {
                let ratio = ours / floor;
                (format!("{ratio:.2}× one client"), format!("≤ {target}×"), ratio <= target)
            }
            Self::AtMost(target, name) => (String::new(), format!("≤ {name}"), ours <= target),
            Self::AtLeast(target, name) => (String::new(), name.to_owned(), ours >= target),
        }
    }
}

/// Formats the table as in `docs/performance.md`.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut table = String::from(
        "| | Python SDK 0.36 | floor | tinkex | ratio | target | |\n|---|---|---|---|---|---|---|\n",
    );
    for Row { name, figures: [python, floor, ours], results } in rows {
        for (i, (ratio, target, met)) in results.iter().enumerate() {
            let result = if *met { "met" } else { "MISSED" };
            let _ = if i == 0 {
                writeln!(
                    table,
                    "| {name} | {python} | {floor} | {ours} | {ratio} | {target} | {result} |"
                )
            } else {
                writeln!(table, "| | | | | {ratio} | {target} | {result} |")
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
