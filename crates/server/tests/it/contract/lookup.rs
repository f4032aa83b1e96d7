//! REST lookups, changes, and error kinds.

use std::time::Duration;

use tinkex::rest::{AccessScope, ListSessions, ListTrainingRuns};
use tinkex::{Env, ErrorKind, LoraOptions, SaveOptions, ServiceClient, TinkerPath};

use super::Subject;
use super::training::{model, train};

pub(super) async fn models_and_runs_are_found(subject: Subject) {
    let models = subject.service.server_capabilities().await.unwrap().supported_models;
    assert!(models.iter().any(|m| m.model_name.as_deref() == Some(&*subject.model)), "{models:?}");
    let model = model(&subject).await;
    let rest = subject.service.rest();
    let id = model.model_id().clone();
    let run = rest.get_training_run(id.clone(), AccessScope::Owned).await.unwrap();
    assert_eq!((&*run.base_model, run.lora_rank), (&*subject.model, Some(8)));
    let newest = rest.list_training_runs(&ListTrainingRuns::default()).await.unwrap();
    assert!(newest.training_runs.iter().any(|run| run.training_run_id == id));
}

pub(super) async fn sessions_are_found(subject: Subject) {
    let model = model(&subject).await;
    let rest = subject.service.rest();
    let id = model.model_id().clone();
    let session = id.as_str().split(':').next().unwrap().to_owned();
    let shown = rest.get_session(&*session, AccessScope::Owned).await.unwrap();
    assert!(shown.training_run_ids.contains(&id));
    let sessions = rest.list_sessions(&ListSessions::default()).await.unwrap().sessions;
    assert!(sessions.iter().any(|id| id.as_str() == session));
}

pub(super) async fn checkpoints_are_listed(subject: Subject) {
    let model = model(&subject).await;
    let rest = subject.service.rest();
    let path =
        model.save_state(SaveOptions::new("contract-list").metadata("k", "v")).await.unwrap();
    let listed = rest.list_checkpoints(model.model_id().clone()).await.unwrap().checkpoints;
    let paths: Vec<&str> = listed.iter().map(|shown| &*shown.tinker_path).collect();
    assert_eq!(paths, [path.to_string()]);
    let info = rest.get_weights_info(&path).await.unwrap();
    assert_eq!((&*info.base_model, info.lora_rank), (&*subject.model, Some(8)));
    let run = rest.get_training_run_by_path(&path, AccessScope::Owned).await.unwrap();
    assert_eq!(&run.training_run_id, model.model_id());
    subject.delete(&path).await;
}

pub(super) async fn checkpoints_are_changed(subject: Subject) {
    let model = model(&subject).await;
    let rest = subject.service.rest();
    let path = model.save_state("contract-rest").await.unwrap();
    let listed = async || {
        let mut all = rest.list_checkpoints(model.model_id().clone()).await.unwrap().checkpoints;
        assert_eq!(all.len(), 1);
        all.remove(0)
    };
    let shown = listed().await;
    assert!(!shown.public);
    // A server that does not know the size omits it.
    assert!(shown.size_bytes.is_none_or(|bytes| bytes > 0));
    rest.set_checkpoint_ttl(&path, Some(std::time::Duration::from_secs(7_200))).await.unwrap();
    assert!(listed().await.expires_at.is_some());
    rest.publish_checkpoint(&path).await.unwrap();
    assert!(listed().await.public);
    rest.unpublish_checkpoint(&path).await.unwrap();
    rest.delete_checkpoint(&path).await.unwrap();
    let error = rest.get_weights_info(&path).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}");
}

pub(super) async fn weights_are_downloaded(subject: Subject) {
    let model = model(&subject).await;
    train(&model, 1).await;
    let save = SaveOptions::new("contract-files").ttl(Duration::from_secs(3_600));
    let saved = model.save_weights_external(save).await.unwrap();
    let urls = subject.service.rest().get_external_weights_urls(&saved.path).await.unwrap().urls;
    let weights = urls.iter().find(|(name, _)| name.contains(".safetensors")).unwrap();
    let response = crate::harness::http_client().get(weights.1).send().await.unwrap();
    let bytes = response.bytes().await.unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(header < bytes.len() as u64, "a safetensors file starts with the length of its header");
    subject.delete(&saved.path).await;
}

pub(super) async fn missing_objects_are_not_found(subject: Subject) {
    let rejected = [ErrorKind::NotFound, ErrorKind::Rejected, ErrorKind::Permission];
    let path: TinkerPath =
        "tinker://00000000-0000-0000-0000-000000000000:train:0/weights/none".parse().unwrap();
    let weights: TinkerPath =
        path.to_string().replace("/weights/", "/sampler_weights/").parse().unwrap();
    let errors = [
        subject.service.rest().get_weights_info(&path).await.unwrap_err(),
        subject.service.rest().delete_checkpoint(&path).await.unwrap_err(),
        subject.service.create_sampling_client_from(&weights).await.unwrap_err(),
        subject.service.create_sampling_client("no/such-model").await.unwrap_err(),
        subject.service.create_lora_training_client("no/such-model").await.unwrap_err(),
        subject
            .service
            .create_lora_training_client(LoraOptions::new(&*subject.model).rank(3))
            .await
            .unwrap_err(),
        subject
            .service
            .rest()
            .get_training_run("none:train:0", AccessScope::Owned)
            .await
            .unwrap_err(),
    ];
    for error in errors {
        let failed = error.kind() == ErrorKind::WorkFailed && error.is_user_error();
        assert!(rejected.contains(&error.kind()) || failed, "{error:?}");
        assert!(!error.to_string().is_empty());
    }
}

pub(super) async fn a_closed_client_returns_an_error(subject: Subject) {
    // A second client of the same server.
    let model = model(&subject).await;
    let builder =
        ServiceClient::builder().env(Env::empty()).base_url(subject.service.base_url().clone());
    let closed = builder.api_key("tml-other").build().unwrap();
    closed.abort().await;
    let error = closed.create_sampling_client(&*subject.model).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error:?}");
    assert_eq!(train(&model, 1).await.len(), 1, "the other client still works");
}
