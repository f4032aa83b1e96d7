//! Looking things up, changing them, and errors that say what they are.

use std::time::Duration;

use tinkex::rest::{AccessScope, ListSessions, ListTrainingRuns};
use tinkex::{Env, ErrorKind, FinishReason, SaveOptions, ServiceClient, TinkerPath};

use super::Any;
use super::training::{model, train};

pub(super) async fn models_and_runs_are_found(any: Any) {
    let models = any.service.server_capabilities().await.unwrap().supported_models;
    assert!(models.iter().any(|m| m.model_name.as_deref() == Some(&*any.model)), "{models:?}");
    let model = model(&any).await;
    let (rest, id) = (any.service.rest(), model.model_id().clone());
    let run = rest.get_training_run(id.clone(), AccessScope::Owned).await.unwrap();
    assert_eq!((&*run.base_model, run.lora_rank), (&*any.model, Some(8)));
    let newest = rest.list_training_runs(&ListTrainingRuns::default()).await.unwrap();
    assert!(newest.training_runs.iter().any(|run| run.training_run_id == id));
}

pub(super) async fn sessions_are_found(any: Any) {
    let model = model(&any).await;
    let (rest, id) = (any.service.rest(), model.model_id().clone());
    let session = id.as_str().split(':').next().unwrap().to_owned();
    let shown = rest.get_session(&*session, AccessScope::Owned).await.unwrap();
    assert!(shown.training_run_ids.contains(&id));
    let sessions = rest.list_sessions(&ListSessions::default()).await.unwrap().sessions;
    assert!(sessions.iter().any(|id| id.as_str() == session));
}

pub(super) async fn checkpoints_are_listed(any: Any) {
    let model = model(&any).await;
    let rest = any.service.rest();
    let path =
        model.save_state(SaveOptions::new("contract-list").metadata("k", "v")).await.unwrap();
    let listed = rest.list_checkpoints(model.model_id().clone()).await.unwrap().checkpoints;
    let paths: Vec<&str> = listed.iter().map(|shown| &*shown.tinker_path).collect();
    assert_eq!(paths, [path.to_string()]);
    let info = rest.get_weights_info(&path).await.unwrap();
    assert_eq!((&*info.base_model, info.lora_rank), (&*any.model, Some(8)));
    let run = rest.get_training_run_by_path(&path, AccessScope::Owned).await.unwrap();
    assert_eq!(&run.training_run_id, model.model_id());
    any.forget(&path).await;
}

pub(super) async fn checkpoints_are_changed(any: Any) {
    let model = model(&any).await;
    let rest = any.service.rest();
    let path = model.save_state("contract-rest").await.unwrap();
    let listed = async || {
        let mut all = rest.list_checkpoints(model.model_id().clone()).await.unwrap().checkpoints;
        assert_eq!(all.len(), 1);
        all.remove(0)
    };
    let shown = listed().await;
    assert!(!shown.public);
    assert!(shown.size_bytes.unwrap() > 0);
    rest.set_checkpoint_ttl(&path, Some(std::time::Duration::from_secs(7_200))).await.unwrap();
    assert!(listed().await.expires_at.is_some());
    rest.publish_checkpoint(&path).await.unwrap();
    assert!(listed().await.public);
    rest.unpublish_checkpoint(&path).await.unwrap();
    rest.delete_checkpoint(&path).await.unwrap();
    let gone = rest.get_weights_info(&path).await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound, "{gone:?}");
}

pub(super) async fn weights_are_downloaded(any: Any) {
    let model = model(&any).await;
    train(&model, 1).await;
    let save = SaveOptions::new("contract-files").ttl(Duration::from_secs(3_600));
    let saved = model.save_weights_external(save).await.unwrap();
    let urls = any.service.rest().get_external_weights_urls(&saved.path).await.unwrap().urls;
    let weights = urls.iter().find(|(name, _)| name.contains(".safetensors")).unwrap();
    let reply = crate::harness::plain().get(weights.1).send().await.unwrap();
    let bytes = reply.bytes().await.unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(header < bytes.len() as u64, "a file of tensors begins with the length of its table");
    any.forget(&saved.path).await;
}

pub(super) async fn what_is_not_there_is_not_found(any: Any) {
    let refused = [ErrorKind::NotFound, ErrorKind::Rejected, ErrorKind::Permission];
    let path: TinkerPath =
        "tinker://00000000-0000-0000-0000-000000000000:train:0/weights/none".parse().unwrap();
    let weights: TinkerPath =
        path.to_string().replace("/weights/", "/sampler_weights/").parse().unwrap();
    let errors = [
        any.service.rest().get_weights_info(&path).await.unwrap_err(),
        any.service.rest().delete_checkpoint(&path).await.unwrap_err(),
        any.service.create_sampling_client_from(&weights).await.unwrap_err(),
        any.service.create_sampling_client("no/such-model").await.unwrap_err(),
        any.service.create_lora_training_client("no/such-model").create().await.unwrap_err(),
        any.service.create_lora_training_client(&*any.model).rank(3).create().await.unwrap_err(),
        any.service.rest().get_training_run("none:train:0", AccessScope::Owned).await.unwrap_err(),
    ];
    for error in errors {
        let work = error.kind() == ErrorKind::WorkFailed && error.is_user_error();
        assert!(refused.contains(&error.kind()) || work, "{error:?}");
        assert!(!error.to_string().is_empty());
    }
}

pub(super) async fn a_closed_client_says_so(any: Any) {
    // One of its own, with the same address and key.
    let model = model(&any).await;
    let own = ServiceClient::builder().env(Env::empty()).base_url(any.service.base_url().clone());
    let own = own.api_key("tml-other").build().unwrap();
    own.close(FinishReason::Success, None).await.unwrap();
    let error = own.create_sampling_client(&*any.model).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    assert_eq!(train(&model, 1).await.len(), 1, "the other client goes on");
}
