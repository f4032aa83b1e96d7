//! `tinkex server check` on intact and damaged data folders.

use crate::sandbox::Sandbox;

#[tokio::test]
async fn server_check_reports_damage_and_changes_nothing() {
    let sandbox = Sandbox::new();
    sandbox.run("sample --local -p moo --max-tokens 2").await.ok();
    let data = sandbox.data();
    let check = format!("server check --data-dir {}", data.display());
    let intact = sandbox.run(&check).await.ok();
    assert!(intact.out.contains("database  intact"), "{}", intact.out);
    assert!(intact.out.contains("payloads  intact"), "{}", intact.out);
    let json = sandbox.run(&format!("{check} --json")).await.ok().json();
    assert_eq!((&json["intact"], &json["database"]["state"]), (&true.into(), &"intact".into()));

    // A folder of weights that the digest in its name does not match.
    let damaged = "run-weights-a~00000000000000000000000000000000";
    std::fs::create_dir_all(data.join("weights").join(damaged)).unwrap();
    let found = sandbox.run(&check).await;
    assert_eq!(found.code, 1, "{}", found.out);
    assert!(found.out.contains("1 damaged"), "{}", found.out);
    std::fs::remove_dir(data.join("weights").join(damaged)).unwrap();

    // A database that cannot be read at all: the folders of weights can still be taken out.
    std::fs::create_dir_all(data.join("weights/run-weights-b")).unwrap();
    let database = data.join("metadata.sqlite");
    let bytes = vec![0xFF; 4096];
    std::fs::write(&database, &bytes).unwrap();
    for line in [check.clone(), format!("{check} --repair")] {
        let found = sandbox.run(&line).await;
        assert_eq!(found.code, 1, "{}", found.out);
        assert!(found.out.contains("database  damaged"), "{}", found.out);
        assert!(found.out.contains("weights/run-weights-b"), "{}", found.out);
        assert_eq!(std::fs::read(&database).unwrap(), bytes, "nothing can be recovered");
    }
    sandbox.run("server check --data-dir missing").await.fails(1, &["cannot check"]);
}
