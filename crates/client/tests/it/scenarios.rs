//! Checks that `docs/scenarios.md` maps every scenario to existing tests, and that every fixture is
//! used.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Scenarios that the client and the command line must pass.
const IDS: &str = "T0.1.1 T0.1.2 T0.1.3 T0.1.4 T0.1.5 T0.1.6 T1.1.1 T1.1.2 T1.1.3 T1.2.1 T1.2.2 \
    T1.2.3 T1.2.4 T1.2.5 Q1 T2.1.1 T2.1.2 T2.2.1 T2.2.2 T2.2.3 T2.2.4 T2.2.5 T2.2.6 T2.3.1 T2.3.2 Q2 \
    T3.1.1 T3.1.2 T3.1.3 T3.2.1 T3.2.2 T3.2.3 T3.2.4 T3.2.5 T4.1.1a T4.1.1b T4.1.2 T4.1.3 T4.1.4 \
    T4.2.1 T4.2.2 T4.2.3 T4.2.4 T4.2.5 T4.3.1 T4.3.2 T4.3.3 T5.1 T5.2.1 T5.2.2 T5.2.3 T5.3.1 T5.3.2 \
    T6.1.1 T6.1.2 T6.1.3 T6.1.4 T6.2 T6.3.1 T6.3.2 T7.1.1 T7.1.2 T7.1.3 T7.2.1 P4C.1 P4C.2 P4C.3 P4C.4 P4C.5 P4C.6 P4C.7 P4C.8 \
    P6B.1 P6B.2 P6B.3 P6B.4 P6B.5 P6C.1 P6C.2 P6C.3 P6C.4 P6C.5 P6C.6 AUD.1 AUD.2 AUD.3 \
    AUD.4 AUD.5 AUD.6 AUD.7 AUD.8 AUD.9 R-JWT R-HOLD R-COPY R-RH R-SVC R-POLL R-TEL R-OLD X1 X2 X3 X4 \
    X5 X6 X7 X8 X9 X10 X11 X12 X13 X14 X15 X16 X17";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn every_scenario_has_an_existing_test() {
    let map = fs::read_to_string(root().join("docs/scenarios.md")).unwrap();
    let mut mapped = BTreeSet::new();
    for row in map.lines().filter(|line| line.starts_with("| ") && line.contains('`')) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let (id, tests) = (cells[1], cells[3]);
        mapped.insert(id);
        for test in tests.split(", ") {
            let names: Vec<&str> = test.split('`').filter(|part| !part.trim().is_empty()).collect();
            let [file, name] = names[..] else {
                panic!("{id}: {test:?} does not name a file and a test")
            };
            let text = fs::read_to_string(root().join("crates").join(file)).unwrap_or_default();
            let at = text.find(&format!("fn {name}("));
            let at = at.unwrap_or_else(|| panic!("{id}: {file} has no test {name}"));
            let above: Vec<&str> = text[..at].lines().rev().take(4).collect();
            assert!(above.iter().any(|line| line.contains("test")), "{name} is not a test");
            let covers = |line: &&str| {
                line.trim_start().strip_prefix("/// Covers ").is_some_and(|ids| {
                    ids.trim_end_matches('.').split(", ").any(|covered| covered == id)
                })
            };
            assert!(above.iter().any(covers), "{name} does not say that it covers {id}");
        }
    }
    let expected: BTreeSet<&str> = IDS.split_whitespace().collect();
    assert_eq!(mapped, expected);
}

/// Covers X17.
#[test]
fn every_fixture_is_read_by_a_test() {
    let mut sources = String::new();
    let mut folders = vec![root().join("crates/client"), root().join("crates/wire")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                sources += &fs::read_to_string(path).unwrap();
            }
        }
    }
    for entry in fs::read_dir(root().join("fixtures/behaviour")).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        // Read by name, or listed in the table of the wire crate's tests.
        let uses =
            [format!("cases(\"{file}\")"), format!("load(\"{file}\")"), format!("(\"{file}\", ")];
        assert!(uses.iter().any(|text| sources.contains(text)), "no test reads {file}");
    }
}
