//! `cargo xtask soak`: runs client programs against two servers, of which one is killed at random
//! moments. Fails if the use of memory, file handles, threads or disk grows.

use crate::step::{XtaskError, ignored_test};

pub(crate) fn run(options: &[&str]) -> Result<(), XtaskError> {
    let (mut minutes, mut seed) = (30_u64, 1_u64);
    let mut options = options.iter();
    while let Some(option) = options.next() {
        let setting = match *option {
            "--minutes" => &mut minutes,
            "--seed" => &mut seed,
            other => return Err(XtaskError::new(format!("soak: unknown option {other}"))),
        };
        *setting = options
            .next()
            .and_then(|value| value.parse().ok())
            .ok_or_else(|| XtaskError::new(format!("soak: {option}: expected a whole number")))?;
    }
    let test = "soak::resources_stay_flat_while_a_server_is_killed";
    ignored_test("soak test", "tinkex-server", test, &[])?
        .variable("TINKEX_SOAK_SECONDS", minutes.saturating_mul(60).to_string())
        .variable("TINKEX_SOAK_SEED", seed.to_string())
        .run()
}
