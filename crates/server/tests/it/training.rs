//! Training through the client.

use tinkex::{AdamParams, Datum, LoraOptions, LossFn};

use crate::harness::{MODEL, TestServer};
use tinkex_autodiff::{GraphArg, GraphNode, LossGraph};

#[tokio::test(flavor = "multi_thread")]
async fn the_loss_decreases() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let models = service.server_capabilities().await.unwrap().supported_models;
    let names: Vec<_> = models.iter().map(|model| model.model_name.as_deref().unwrap()).collect();
    assert_eq!(names, ["tinkex/tiny", MODEL]);
    assert_eq!(models[1].max_context_length, Some(256));
    let model =
        service.create_lora_training_client(LoraOptions::new(MODEL).rank(8).seed(1)).await.unwrap();
    let batch = vec![Datum::completion([5, 6, 7], [8, 9, 10]).unwrap(); 4];
    let mut losses = Vec::new();
    for _ in 0..8 {
        let adam = AdamParams::with_learning_rate(1e-2);
        let step = model.step(batch.clone(), LossFn::CrossEntropy, adam).await.unwrap();
        assert_eq!(step.pass.outputs.len(), 4);
        losses.push(step.pass.metrics["loss:sum"].as_f64());
        assert!(step.optim.metrics["unclipped_grad_l2:mean"].as_f64() > 0.0);
    }
    assert!(losses[7] < losses[0] * 0.7, "{losses:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_built_in_model_is_always_available() {
    let test_server = TestServer::new().await;
    let service = test_server.client();
    let model =
        service.create_lora_training_client(LoraOptions::new("tinkex/tiny").rank(4)).await.unwrap();
    let info = model.get_info().await.unwrap();
    let folder = std::path::PathBuf::from(info.model_data.tokenizer_id.unwrap());
    assert!(folder.join("tokenizer.json").is_file(), "{}", folder.display());
    let tokenizer =
        tinkex_engine::tokenizer::Tokenizer::read(folder.join("tokenizer.json")).unwrap();
    let sampler = service.create_sampling_client("tinkex/tiny").await.unwrap();
    let params = tinkex::SamplingParams::new().max_tokens(40).temperature(0.0).stop(" ");
    let result = sampler.sample(tokenizer.encode("Once upon a"), params).await.unwrap();
    let text = tokenizer.vocabulary().decode(&result.sequences[0].tokens);
    assert!(text.contains(' '), "stopped at a stop string: {text:?}");
    assert_eq!(result.sequences[0].stop_reason, tinkex::StopReason::Stop);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_custom_loss_runs_on_the_server() {
    let test_server = TestServer::new().await;
    let http = test_server.http();
    let session = http.session().await;
    let graph = LossGraph::new(vec![
        GraphNode::placeholder("logprobs"),
        GraphNode::function("neg", "operator.neg", [GraphArg::node("logprobs")]),
        GraphNode::method("total", "sum", [GraphArg::node("neg")]),
        GraphNode::output(GraphArg::node("total"), [("custom/nll:sum", GraphArg::node("total"))]),
    ]);
    let request = |graph: &serde_json::Value, n: u32| {
        serde_json::json!({
            "session_id": session, "custom_loss_seq_id": n, "name": "nll",
            "type": "create_custom_loss",
            "inputs": [{"name": "logprobs", "rank": 1}], "graph": graph,
        })
    };
    let graph = serde_json::to_value(graph).unwrap();
    let (status, future) = http.post("/create_custom_loss", request(&graph, 0)).await;
    assert_eq!(status, 200, "{future}");
    let loss = http.result(&future).await["loss_id"].as_str().unwrap().to_owned();
    let mut bad = graph;
    bad["nodes"][1]["target"] = "os.system".into();
    assert_eq!(http.post("/create_custom_loss", request(&bad, 1)).await.0, 400);

    let model = http.model(&session).await;
    let data = vec![Datum::completion([3, 4], [5]).unwrap()];
    let pass = tinkex_wire::ForwardBackward::new(model.as_str(), data, LossFn::Custom)
        .seq_id(tinkex_wire::Seq::FIRST)
        .loss_fn_config(tinkex_wire::LossConfig::custom(&loss.as_str().into()));
    let body = pass.to_proto().unwrap().to_vec();
    let (status, future) = http.send("POST", "/api/v1/forward_backward", &[], body).await;
    assert_eq!(status, 200, "{future}");
    let (_, step) = http.post("/optim_step", crate::harness::step(&model, 2, 0.1)).await;
    let norm = http.result(&step).await["metrics"]["unclipped_grad_l2:mean"].as_f64().unwrap();
    assert!(norm > 0.0);
}
