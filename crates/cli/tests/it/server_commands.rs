//! `tinkex server`: drain, backup, restore, sizes.

use crate::sandbox::Sandbox;
use crate::serve::{ANY_PORT, SAMPLE, ServeProcess};

#[tokio::test]
async fn a_running_server_is_drained_and_used_again() {
    let sandbox = Sandbox::new();
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    sandbox.run(SAMPLE).await.ok();
    let drained = sandbox.run("server drain --wait --json").await.ok().json();
    assert_eq!((&drained["draining"], &drained["may_stop"]), (&true.into(), &true.into()));
    let text = sandbox.run("server drain").await.ok().out;
    assert!(text.contains("it may be stopped"), "{text}");
    let undone = sandbox.run("server drain --undo").await.ok().out;
    assert!(undone.contains("accepts new work"), "{undone}");
    sandbox.run(SAMPLE).await.ok();
    serving.end();
    sandbox.run("server drain").await.fails(4, &["no server runs on the data folder"]);
}

#[tokio::test]
async fn a_restored_backup_is_served_with_its_runs() {
    let sandbox = Sandbox::new();
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    let save = "checkpoint save --local --base-model tinkex/tiny --rank 4 --json";
    let saved = sandbox.run(save).await.ok().json();
    let run = saved["model_id"].as_str().unwrap();
    let made = sandbox.run("server backup backups --json").await.ok().json();
    assert_eq!(made["state"], "complete", "{made}");
    let again = sandbox.run("server backup backups").await.ok().out;
    assert!(again.contains(" copied"), "{again}");
    let usage = sandbox.run("server du -f json").await.ok().json();
    assert_eq!(usage["runs"][0]["run"], run);
    let table = sandbox.run("server du --by run").await.ok().out;
    assert!(table.contains("admin"), "{table}");
    let sandbox_data = sandbox.data();
    let in_use = format!("server restore backups --data-dir {}", sandbox_data.display());
    sandbox.run(&in_use).await.fails(2, &["exists and is not empty"]);
    sandbox.run("server restore nothing --data-dir new").await.fails(4, &["cannot restore"]);
    serving.end();
    sandbox.run("server restore backups --data-dir new").await.ok();
    let restored = ServeProcess::start(&sandbox, &["--port", "0", "--data-dir", "new"]);
    let usage = sandbox.run("server du --data-dir new --json").await.ok().json();
    assert_eq!(usage["runs"][0]["run"], run);
    restored.end();
}
