//! Lists all checkpoints, and sets the checkpoints of one training run to expire in a day.
//!
//! `TINKER_API_KEY=tml-… cargo run -p tinkex --example checkpoints -- [RUN_ID]`

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use futures_util::TryStreamExt as _;
use tinkex::{ServiceClient, TinkerPath};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let rest = ServiceClient::from_env()?.rest();
    let mut checkpoints = std::pin::pin!(rest.user_checkpoints());
    let mut bytes = 0;
    while let Some(checkpoint) = checkpoints.try_next().await? {
        println!("{} {}", checkpoint.time, checkpoint.tinker_path);
        bytes += checkpoint.size_bytes.unwrap_or(0);
    }
    println!("{bytes} bytes in total");

    if let Some(run) = std::env::args().nth(1) {
        for checkpoint in rest.list_checkpoints(run).await?.checkpoints {
            let path: TinkerPath = checkpoint.tinker_path.parse()?;
            rest.set_checkpoint_ttl(&path, Some(std::time::Duration::from_secs(24 * 60 * 60)))
                .await?;
            println!("{path} expires in a day");
        }
    }
    Ok(())
}
