//! The API key that a local server creates in its data folder.

use std::io::{Read as _, Write as _};

use crate::sandbox::Sandbox;
use crate::serve::{ANY_PORT, SAMPLE, ServeProcess};

/// Returns the status of a request with this API key.
fn status(url: &str, key: Option<&str>) -> u16 {
    let host = url.strip_prefix("http://").unwrap();
    let key = key.map(|key| format!("x-api-key: {key}\r\n")).unwrap_or_default();
    let path = "/api/v1/get_server_capabilities";
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{key}\r\n");
    let mut stream = std::net::TcpStream::connect(host).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response.split(' ').nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn other_users_of_the_machine_cannot_use_the_server() {
    let sandbox = Sandbox::new();
    let mut serving = ServeProcess::start(&sandbox, ANY_PORT);
    let key = sandbox.read("data/key").trim().to_owned();
    assert!(key.starts_with("tml-") && key.len() >= 36, "{}", key.len());
    assert_eq!(status(&serving.url, None), 401);
    assert_eq!(status(&serving.url, Some("tml-local")), 401);
    assert_eq!(status(&serving.url, Some(&key)), 200);
    // The key is in the file, not in the log.
    let line = serving.line_of_log("to use it: ");
    let file = sandbox.data().join("key");
    assert_eq!(
        line,
        format!(
            "export TINKER_BASE_URL={} TINKER_API_KEY=\"$(cat {})\"",
            serving.url,
            file.display()
        )
    );
    let shell = std::process::Command::new("sh")
        .args(["-c", &format!("{line}; printf %s \"$TINKER_API_KEY\"")])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(shell.stdout).unwrap(), key);
    // Commands find the key.
    sandbox.run(SAMPLE).await.ok();
    let found = sandbox.run("doctor --local").await.ok();
    assert!(found.out.contains(&serving.url), "{}", found.out);
    sandbox.run("auth status --local").await.ok();
    let log = serving.end();
    assert!(!log.contains(&key), "{log}");

    // The next server, of a command or permanent, has the same key.
    sandbox.run(SAMPLE).await.ok();
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    assert_eq!(sandbox.read("data/key").trim(), key);
    assert_eq!(status(&serving.url, Some(&key)), 200);
    serving.kill();
}

#[tokio::test]
async fn a_key_file_that_others_can_read_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let sandbox = Sandbox::new();
    sandbox.run(SAMPLE).await.ok();
    let file = sandbox.data().join("key");
    let set_mode = |mode| {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let messages = ["data/key: other users can access the file (mode 640)", "chmod 600 "];
    set_mode(0o640);
    sandbox.run(SAMPLE).await.fails(1, &messages);
    sandbox.run("serve --port 0").await.fails(1, &messages);
    set_mode(0o600);
    let serving = ServeProcess::start(&sandbox, ANY_PORT);
    set_mode(0o640);
    sandbox.run(SAMPLE).await.fails(1, &messages);
    let found = sandbox.run("doctor --local").await;
    assert!(found.out.contains(messages[0]), "{}", found.out);
    set_mode(0o600);
    sandbox.run(SAMPLE).await.ok();
    serving.kill();

    // A symbolic link could make the server use a file of another user.
    std::fs::rename(&file, sandbox.path("moved")).unwrap();
    std::os::unix::fs::symlink(sandbox.path("moved"), &file).unwrap();
    sandbox.run(SAMPLE).await.fails(1, &["data/key: not a regular file"]);
}

#[tokio::test]
async fn a_server_without_a_key_is_started_on_request_only() {
    let sandbox = Sandbox::new();
    let mut serving = ServeProcess::start(&sandbox, &["--port", "0", "--no-key"]);
    assert_eq!(status(&serving.url, Some("tml-any")), 200);
    let line = serving.line_of_log("to use it: ");
    assert!(line.ends_with(" TINKER_API_KEY=tml-local"), "{line}");
    sandbox.run(SAMPLE).await.ok();
    assert!(!sandbox.data().join("key").exists());
    serving.kill();
}
