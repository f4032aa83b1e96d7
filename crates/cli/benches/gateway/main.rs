//! `cargo xtask bench gateway`: what `tinkex serve --upstream` adds to a request.
//!
//! The upstream is canned: it responds at once with prepared bytes and computes nothing. The gateway
//! runs in its own process. The same minimal HTTP client sends the same requests to the upstream
//! and to the gateway; the difference is the cost of the gateway. A measurement above its limit
//! fails the run.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]
#![expect(clippy::unwrap_used, reason = "an error ends the run")]

#[path = "../../../server/benches/server/connection.rs"]
mod connection;
mod load;
mod process;
mod upstream;

use std::process::ExitCode;

use connection::{Connection, Pool};
use load::{Target, alone, in_flight, outstanding};
use process::GatewayProcess;
use upstream::CannedUpstream;

/// Number of samples in flight while CPU time is measured, and number of rounds of as many samples.
const IN_FLIGHT: (usize, u32) = (1_000, 20);
/// Number of samples that wait for the upstream while memory is measured.
const OUTSTANDING: u32 = 10_000;
/// Number of requests that are sent one after the other.
const ALONE: u32 = 300;

/// A measurement: its name with the unit, its value, and its maximum if it has one.
struct Measurement(String, f64, Option<f64>);

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let measurements = runtime.block_on(measure());
    println!("\n| | Measured | Limit | |\n|---|---|---|---|");
    let mut missed = false;
    for Measurement(name, value, limit) in measurements {
        let met = limit.is_none_or(|limit| value <= limit);
        let verdict = if limit.is_none() {
            ""
        } else if met {
            "met"
        } else {
            "MISSED"
        };
        let limit = limit.map_or_else(|| "–".to_owned(), |limit| format!("≤ {limit}"));
        println!("| {name} | {value:.2} | {limit} | {verdict} |");
        missed |= !met;
    }
    if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

async fn measure() -> Vec<Measurement> {
    let upstream = CannedUpstream::start();
    let gateway = GatewayProcess::start(&upstream.url());
    let mut measurements = Vec::new();

    let direct = Target::direct(Connection::new(&upstream.address)).await;
    let through = Target::through(Connection::new(&gateway.address)).await;
    for request in load::ALONE_REQUESTS {
        // Alternate, so that a slow period of the machine disturbs both.
        let mut without = Vec::new();
        let mut with = Vec::new();
        for _ in 0..3 {
            without.extend(alone(&direct, request, ALONE / 3).await);
            with.extend(alone(&through, request, ALONE / 3).await);
        }
        let without = median(&mut without);
        let with = median(&mut with);
        let name = request.name();
        println!("{name} alone: {without:.2} ms directly, {with:.2} ms through the gateway");
        let name = format!("ms added to one {name}, alone");
        measurements.push(Measurement(name, with - without, Some(5.0)));
    }

    let pool = Pool::new(&gateway.address, IN_FLIGHT.0);
    pool.open().await;
    let before = gateway.cpu_seconds();
    let seconds = in_flight(&pool, IN_FLIGHT.1).await;
    let samples = IN_FLIGHT.0 as f64 * f64::from(IN_FLIGHT.1);
    let cpu = gateway.cpu_seconds() - before;
    println!("{samples} samples, {} in flight: {:.0} per second", IN_FLIGHT.0, samples / seconds);
    let name = format!("µs of CPU of the gateway per sample, {} in flight", IN_FLIGHT.0);
    measurements.push(Measurement(name, 1e6 * cpu / samples, Some(300.0)));

    let idle = gateway.memory("VmRSS");
    upstream.hold(true);
    let wait = outstanding(&pool, OUTSTANDING).await;
    let held = gateway.memory("VmRSS");
    let at_upstream = upstream.waiting();
    upstream.hold(false);
    wait.finish(&pool).await;
    let peak = gateway.memory("VmHWM");
    println!("{OUTSTANDING} outstanding: {at_upstream} polls wait at the upstream");
    let name = |what: &str| format!("MiB of the gateway, {what}");
    measurements.push(Measurement(name("before"), idle, None));
    measurements.push(Measurement(name(&format!("{OUTSTANDING} outstanding")), held, Some(400.0)));
    measurements.push(Measurement(name("peak"), peak, Some(400.0)));
    measurements
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
