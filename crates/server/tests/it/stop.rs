//! Servers that end while they are used, and start where something is missing.

use tinkex_server::Server;

use crate::house::{House, Http, options, step};

#[tokio::test(flavor = "multi_thread")]
async fn a_server_stops_while_requests_come() {
    let house = House::new().await;
    let http = house.http();
    let session = http.session().await;
    let model = http.model(&session).await;
    let base = house.server.base_url();
    let (begun, mut seen) = tokio::sync::mpsc::channel::<()>(64);
    let clients: Vec<_> = (1..9)
        .map(|n| {
            let (base, model, begun) = (base.clone(), model.clone(), begun.clone());
            tokio::spawn(async move {
                let client = crate::house::plain();
                for seq in (n..).step_by(8) {
                    let call = step(&model, seq, 0.0).to_string();
                    let url = format!("{base}/api/v1/optim_step");
                    // Its connection is refused in the end.
                    if client.post(url).body(call).send().await.is_err() {
                        return;
                    }
                    let _ = begun.try_send(());
                }
            })
        })
        .collect();
    seen.recv().await.unwrap();
    house.server.stop().await;
    for client in clients {
        client.await.unwrap();
    }
    // What was promised goes on.
    let server = Server::start(options(house.data.path())).await.unwrap();
    assert_eq!(Http::new(&server.base_url()).get("/api/v1/healthz").await.0, 200);
}
