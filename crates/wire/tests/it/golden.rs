//! Recorded exchanges of `fixtures/wire`, decoded and encoded in both directions.

use std::collections::BTreeSet;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tinkex_wire::codec::json as codec;
use tinkex_wire::rest::*;
use tinkex_wire::*;

use crate::describe;
use crate::fixtures::{self, Recorded};

#[test]
fn all_recorded_exchanges_round_trip() {
    let all = fixtures::files("wire");
    let mut covered = BTreeSet::new();
    let mut routes = Vec::new();
    for file in all.iter().filter(|file| file.ends_with(".request.json")) {
        let name = file.strip_suffix(".request.json").unwrap();
        let exchange = Exchange::load(name, &all, &mut covered);
        exchange.check_request();
        exchange.check_response();
        routes.push(exchange.found.route);
    }
    let unread: Vec<_> = all.difference(&covered).collect();
    assert!(unread.is_empty(), "fixtures that no test reads: {unread:?}");
    let untested: Vec<_> = Route::ALL.iter().filter(|route| !routes.contains(route)).collect();
    assert!(untested.is_empty(), "routes without an exchange: {untested:?}");
}

/// Recorded request and response of one HTTP exchange.
struct Exchange {
    name: String,
    request: Recorded,
    response: Recorded,
    /// Decoded form of a protobuf request.
    decoded_request: Option<Value>,
    /// Decoded form of a protobuf response.
    decoded_response: Option<Value>,
    /// Route and path parameters of the request.
    found: RouteMatch,
}

impl Exchange {
    fn load(name: &str, all: &BTreeSet<String>, covered: &mut BTreeSet<String>) -> Self {
        let mut read = |suffix: &str| {
            let file = format!("{name}.{suffix}.json");
            all.contains(&file).then(|| {
                covered.insert(file.clone());
                fixtures::load("wire", &file)
            })
        };
        let request = Recorded(read("request").unwrap());
        let method = request.0["method"].as_str();
        let path = request.0["path"].as_str();
        let found = Route::find(method.unwrap(), path.unwrap())
            .unwrap_or_else(|| panic!("{name}: no route for {path:?}"));
        Self {
            name: name.to_owned(),
            request,
            response: Recorded(read("response").unwrap()),
            decoded_request: read("request.decoded"),
            decoded_response: read("response.decoded"),
            found,
        }
    }

    fn target(&self) -> &str {
        self.request.0["path"].as_str().unwrap()
    }

    fn query<T: DeserializeOwned>(&self) -> T {
        let query = self.target().split_once('?').map_or("", |(_, query)| query);
        tinkex_wire::codec::query::decode(query).unwrap()
    }

    fn param(&self, at: usize) -> &str {
        &self.found.params[at]
    }

    fn checkpoint(&self) -> TinkerPath {
        let kind = CheckpointKind::from_segment(self.param(1)).unwrap();
        TinkerPath::new(self.param(0), kind, self.param(2)).unwrap()
    }

    /// Decodes the request body, as a server does.
    fn body<T: DeserializeOwned>(&self) -> T {
        codec::decode(&self.request.body()).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Encodes the decoded request, as a client does, and compares it with the recording.
    fn same<T: ApiRequest>(&self, request: &T) {
        let name = &self.name;
        assert_eq!(T::ROUTE, self.found.route, "{name}");
        request.validate().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(request.target().unwrap(), self.target(), "{name}");
        let body = request.body().unwrap();
        match (&body, T::ROUTE.body()) {
            (RequestBody::Empty, BodyCodec::Empty) => {
                assert_eq!(self.request.body(), "", "{name}");
            }
            (RequestBody::Json(bytes), BodyCodec::Json) => {
                let sent: Value = serde_json::from_slice(bytes).unwrap();
                assert_eq!(&sent, self.request.json(), "{name}");
            }
            (RequestBody::Proto(bytes), BodyCodec::Proto) => {
                assert_eq!(bytes, &self.request.plain_body(), "{name}");
            }
            other => panic!("{name}: {other:?}"),
        }
        if let Some(sent) = self.request.header("content-type") {
            assert_eq!(body.content_type(), sent, "{name}");
        }
    }

    fn check_request(&self) {
        let id = || self.param(0);
        match self.found.route {
            Route::ClientConfig => self.same(&self.body::<ClientConfigRequest>()),
            Route::DynamicConfig => self.same(&self.body::<DynamicConfigRequest>()),
            Route::AuthToken => self.same(&self.body::<AuthTokenRequest>()),
            Route::CreateSession => self.same(&self.body::<CreateSession>()),
            Route::SessionHeartbeat => self.same(&self.body::<SessionHeartbeat>()),
            Route::FinishSession => {
                self.same(&FinishSession::new(id(), self.body()));
            }
            Route::CreateModel => self.same(&self.body::<CreateModel>()),
            Route::GetInfo => self.same(&self.body::<GetInfo>()),
            Route::ForwardBackward => self.check_training_request(),
            Route::OptimStep => self.same(&self.body::<OptimStep>()),
            Route::SaveWeights => self.same(&self.body::<SaveWeights>()),
            Route::SaveWeightsForSampler => self.same(&self.body::<SaveWeightsForSampler>()),
            Route::SaveWeightsExternal => self.same(&self.body::<SaveWeightsExternal>()),
            Route::LoadWeights => self.same(&self.body::<LoadWeights>()),
            Route::CreateCustomLoss => self.same(&self.body::<CreateCustomLoss>()),
            Route::CreateSamplingSession => self.same(&self.body::<CreateSamplingSession>()),
            Route::JoinSamplingSession => self.same(&self.body::<JoinSamplingSession>()),
            Route::Sample => self.same(&self.body::<SampleRequest>()),
            Route::RetrieveFuture => self.same(&self.body::<RetrieveFuture>()),
            Route::RetrieveFutures => self.same(&self.body::<RetrieveFutures>()),
            Route::CancelFuture => self.same(&self.body::<CancelFuture>()),
            Route::Telemetry => self.same(&self.body::<TelemetryBatch>()),
            Route::ServerCapabilities => self.same(&ServerCapabilitiesRequest),
            Route::Health => self.same(&HealthRequest),
            Route::WeightsInfo => self.same(&self.body::<WeightsInfoRequest>()),
            Route::CopyWeights => self.same(&self.body::<CopyWeights>()),
            Route::ListTrainingRuns => self.same(&self.query::<ListTrainingRuns>()),
            Route::GetTrainingRun => {
                self.same(&GetTrainingRun::new(id()).query(self.query::<ScopeQuery>()));
            }
            Route::ListCheckpoints => self.same(&ListCheckpoints::new(id())),
            Route::DeleteCheckpoint => self.same(&DeleteCheckpoint::new(self.checkpoint())),
            Route::PublishCheckpoint => self.same(&PublishCheckpoint::new(self.checkpoint())),
            Route::UnpublishCheckpoint => {
                self.same(&UnpublishCheckpoint::new(self.checkpoint()));
            }
            Route::SetCheckpointTtl => {
                self.same(&SetCheckpointTtl::new(
                    self.checkpoint(),
                    self.body::<CheckpointTtl>().ttl_seconds,
                ));
            }
            Route::ExternalWeightsUrls => {
                self.same(&ExternalWeightsUrlsRequest::new(self.checkpoint()));
            }
            Route::ListUserCheckpoints => self.same(&self.query::<ListUserCheckpoints>()),
            Route::ListSessions => self.same(&self.query::<ListSessions>()),
            Route::GetSession => {
                self.same(&GetSession::new(id()).query(self.query::<ScopeQuery>()));
            }
            Route::SearchSessions => self.same(&self.body::<SearchSessions>()),
            Route::AssignSessionProject => {
                self.same(&AssignSessionProject::new(
                    id(),
                    self.body::<SessionProject>().project_id,
                ));
            }
            Route::TraceExport => self.same(&TraceExportRequest::new(id())),
            Route::GetSampler => self.same(&GetSampler::new(id())),
            Route::BillingUsage => self.same(&self.query::<BillingUsageRequest>()),
            Route::StorageUsage => self.same(&self.query::<StorageUsageRequest>()),
            Route::AuditLog => self.same(&self.query::<AuditLogRequest>()),
            Route::GetApiKey => self.same(&ApiKeyRequest),
            Route::DeleteApiKey => self.same(&DeleteApiKey),
            Route::ImportAdapter
            | Route::DeleteTrainingRun
            | Route::DiscardGradient
            | Route::CloseSampler
            | Route::ListKeys
            | Route::CreateKey
            | Route::RevokeKey
            | Route::RotateKey
            | Route::ListUsers
            | Route::SetUserLimits
            | Route::ShareRun
            | Route::UnshareRun
            | Route::Completions
            | Route::UnloadModel
            | Route::StartDrain
            | Route::CancelDrain
            | Route::GetDrainStatus
            | Route::StartBackup
            | Route::GetBackupStatus
            | Route::GetDiskUsage => {
                panic!("{}: the API does not have the route", self.name)
            }
        }
    }

    fn check_training_request(&self) {
        let request = ForwardBackward::from_proto(&self.request.plain_body()).unwrap();
        let decoded = self.decoded_request.as_ref().expect("a decoded form");
        assert_eq!(&describe::request(&request), decoded, "{}", self.name);
        self.same(&request);
    }

    fn check_response(&self) {
        let status = self.response.0["status"].as_u64().unwrap();
        let body = self.response.plain_body();
        match status {
            408 => {
                let pending = PollResponse::decode_timeout(&body);
                let state = self.response.json()["queue_state"].as_str();
                assert_eq!(pending.queue_state.map(QueueState::as_str), state);
                let reason = self.response.json()["queue_state_reason"].as_str();
                assert_eq!(pending.queue_state_reason.as_deref(), reason);
            }
            400.. => {
                let message = ErrorBody::message(&body).unwrap();
                assert_eq!(message, self.response.json()["detail"].as_str().unwrap());
                assert_eq!(codec::decode::<ErrorBody>(&body).unwrap().detail, message);
            }
            _ => self.check_success(&body),
        }
    }

    /// Decodes the response, encodes it again, and compares it with the recording.
    fn response<T: ApiResponse + Serialize>(&self) {
        let body = self.response.plain_body();
        let response = T::from_body(&body).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        self.check_fields(&serde_json::to_value(&response).unwrap());
    }

    /// Checks that the decoded value contains all recorded fields.
    fn check_fields(&self, decoded: &Value) {
        if let Err(path) = check_fields(self.response.json(), decoded) {
            panic!("{}: the decoded value lacks {path}: {decoded}", self.name);
        }
    }

    fn check_success(&self, body: &Bytes) {
        match self.found.route {
            Route::ClientConfig => self.response::<ClientConfig>(),
            Route::DynamicConfig => self.response::<DynamicConfig>(),
            Route::AuthToken => self.response::<AuthToken>(),
            Route::CreateSession => self.response::<SessionCreated>(),
            Route::SessionHeartbeat => self.response::<HeartbeatAcknowledged>(),
            Route::GetInfo => self.response::<ModelInfo>(),
            Route::CreateSamplingSession => self.response::<SamplingSessionCreated>(),
            Route::JoinSamplingSession => self.response::<SamplingSessionJoined>(),
            Route::RetrieveFutures => self.response::<FuturesRetrieved>(),
            Route::Telemetry => self.response::<TelemetryResponse>(),
            Route::ServerCapabilities => self.response::<ServerCapabilities>(),
            Route::Health => self.response::<Health>(),
            Route::WeightsInfo => self.response::<WeightsInfo>(),
            Route::CopyWeights => self.response::<WeightsCopied>(),
            Route::ListTrainingRuns => self.response::<TrainingRunPage>(),
            Route::GetTrainingRun => self.response::<TrainingRun>(),
            Route::ListCheckpoints | Route::ListUserCheckpoints => {
                self.response::<CheckpointPage>();
            }
            Route::ExternalWeightsUrls => self.response::<ExternalWeightsUrls>(),
            Route::ImportAdapter
            | Route::DeleteTrainingRun
            | Route::DiscardGradient
            | Route::CloseSampler
            | Route::ListKeys
            | Route::CreateKey
            | Route::RevokeKey
            | Route::RotateKey
            | Route::ListUsers
            | Route::SetUserLimits
            | Route::ShareRun
            | Route::UnshareRun
            | Route::Completions
            | Route::UnloadModel
            | Route::StartDrain
            | Route::CancelDrain
            | Route::GetDrainStatus
            | Route::StartBackup
            | Route::GetBackupStatus
            | Route::GetDiskUsage => {
                panic!("{}: the API does not have the route", self.name)
            }
            Route::ListSessions => self.response::<SessionPage>(),
            Route::GetSession => self.response::<SessionInfo>(),
            Route::SearchSessions => self.response::<SessionSearchPage>(),
            Route::TraceExport => self.response::<TraceExport>(),
            Route::GetSampler => self.response::<SamplerInfo>(),
            Route::BillingUsage => self.response::<BillingUsage>(),
            Route::StorageUsage => self.response::<StorageUsage>(),
            Route::AuditLog => self.response::<AuditLog>(),
            Route::GetApiKey => self.response::<ApiKeyInfo>(),
            Route::RetrieveFuture => self.check_poll_response(body),
            Route::CreateModel
            | Route::ForwardBackward
            | Route::OptimStep
            | Route::SaveWeights
            | Route::SaveWeightsForSampler
            | Route::SaveWeightsExternal
            | Route::LoadWeights
            | Route::CreateCustomLoss
            | Route::Sample => {
                assert_eq!(self.found.route.response(), ResponseCodec::SubmitResponse);
                self.response::<SubmitResponse>();
            }
            Route::FinishSession
            | Route::CancelFuture
            | Route::DeleteCheckpoint
            | Route::PublishCheckpoint
            | Route::UnpublishCheckpoint
            | Route::SetCheckpointTtl
            | Route::AssignSessionProject
            | Route::DeleteApiKey => {
                assert_eq!(self.found.route.response(), ResponseCodec::Ignored);
                <()>::from_body(body).unwrap();
            }
        }
    }

    fn check_poll_response(&self, body: &Bytes) {
        let content_type = self.response.header("content-type").unwrap();
        let response = PollResponse::decode(content_type, body).unwrap();
        let json = self.response.json();
        let (sent_type, sent) = response.encode(&"r".into());
        assert_eq!(PollResponse::decode(sent_type, &sent).unwrap(), response, "{}", self.name);
        match &response {
            PollResponse::TryAgain(pending) => {
                assert_eq!(json["type"], "try_again");
                assert_eq!(json["queue_state"], pending.queue_state.unwrap().as_str());
                let reason = pending.queue_state_reason.as_deref();
                assert_eq!(json["queue_state_reason"].as_str(), reason);
            }
            PollResponse::MetadataOnly { response_payload_size } => {
                assert_eq!(json["response_payload_size"], json!(response_payload_size));
            }
            PollResponse::Failed(failed) => {
                assert_eq!(json["error"], failed.error);
                let category = json["category"].as_str().unwrap();
                assert_eq!(failed.category, ErrorCategory::from_name(category));
            }
            PollResponse::Ready(payload) => self.check_payload(payload),
        }
    }

    fn check_payload(&self, payload: &ResultPayload) {
        let request_type = self.request.header(header::REQUEST_TYPE).unwrap();
        match request_type {
            "CreateModel" => self.output::<CreateModel>(payload),
            "OptimStep" => self.output::<OptimStep>(payload),
            "SaveWeights" => self.output::<SaveWeights>(payload),
            "SaveWeightsForSampler" => self.output::<SaveWeightsForSampler>(payload),
            "SaveWeightsExternal" => self.output::<SaveWeightsExternal>(payload),
            "LoadWeights" => self.output::<LoadWeights>(payload),
            "CreateCustomLoss" => self.output::<CreateCustomLoss>(payload),
            "Sample" if self.decoded_response.is_none() => self.output::<SampleRequest>(payload),
            "Sample" => {
                let response = SampleRequest::decode_output(payload).unwrap();
                self.check_decoded(&describe::sample(&response));
                assert_eq!(SampleResponse::from_proto(&response.to_proto()).unwrap(), response);
            }
            "Forward" | "ForwardBackward" => {
                let output = ForwardBackward::decode_output(payload).unwrap();
                self.check_decoded(&describe::output(&output));
                assert_eq!(ForwardBackwardOutput::from_proto(&output.to_proto()).unwrap(), output);
            }
            other => panic!("{}: {other}", self.name),
        }
    }

    fn output<T: SubmitRequest<Output: Serialize>>(&self, payload: &ResultPayload) {
        let output =
            T::decode_output(payload).unwrap_or_else(|error| panic!("{}: {error}", self.name));
        self.check_fields(&serde_json::to_value(output).unwrap());
    }

    /// Compares a decoded result with the recorded decoded form.
    fn check_decoded(&self, decoded: &Value) {
        let expected = self.decoded_response.as_ref().expect("a decoded form");
        assert_eq!(decoded, &describe::normalized(expected), "{}", self.name);
    }
}

/// Checks that a decoded value contains all recorded fields except nulls. Returns the path of the
/// first field that is missing or differs.
fn check_fields(recorded: &Value, decoded: &Value) -> Result<(), String> {
    match (recorded, decoded) {
        (Value::Object(fields), Value::Object(_)) => {
            for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
                check_fields(value, &decoded[key]).map_err(|path| format!(".{key}{path}"))?;
            }
            Ok(())
        }
        (Value::Array(items), Value::Array(others)) if items.len() == others.len() => {
            for (i, (item, other)) in items.iter().zip(others).enumerate() {
                check_fields(item, other).map_err(|path| format!("[{i}]{path}"))?;
            }
            Ok(())
        }
        _ if recorded == decoded => Ok(()),
        _ => Err(String::new()),
    }
}
