//! Decoders under test, for the fuzz tests here and the coverage-guided ones in `fuzz/`.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tinkex_wire::rest::*;
use tinkex_wire::*;

/// Limit of decompression, in bytes.
pub(crate) const MAX_DECOMPRESSED: usize = 1 << 16;

/// A decoder under test. Returns an error if it violates a rule.
pub(crate) type Target = fn(&Bytes) -> Result<(), String>;

fn json<T: DeserializeOwned + Serialize>(bytes: &Bytes) -> Result<(), String> {
    let Ok(value) = codec::json::decode::<T>(bytes) else {
        return Ok(());
    };
    let encoded = codec::json::encode(&value)
        .map_err(|error| format!("the decoded value cannot be encoded: {error}"))?;
    let again = codec::json::decode::<T>(&encoded)
        .map_err(|error| format!("the encoded value cannot be decoded: {error}"))?;
    same(&encoded, &codec::json::encode(&again).map_err(|error| error.to_string())?)
}

fn same<T: PartialEq + std::fmt::Debug>(one: &T, other: &T) -> Result<(), String> {
    if one == other { Ok(()) } else { Err(format!("{one:?} became {other:?}")) }
}

fn request_proto(bytes: &Bytes) -> Result<(), String> {
    let Ok(request) = ForwardBackward::from_proto(bytes) else {
        return Ok(());
    };
    let encoded = request
        .to_proto()
        .map_err(|error| format!("the decoded request cannot be encoded: {error}"))?;
    let again = ForwardBackward::from_proto(&encoded).map_err(|error| error.to_string())?;
    // Compare bytes: a setting may be NaN, which is not equal to itself.
    same(&again.to_proto().map_err(|error| error.to_string())?, &encoded)
}

fn output_proto(bytes: &Bytes) -> Result<(), String> {
    let Ok(output) = ForwardBackwardOutput::from_proto(bytes) else {
        return Ok(());
    };
    let encoded = output.to_proto();
    let again = ForwardBackwardOutput::from_proto(&encoded).map_err(|error| error.to_string())?;
    same(&again.to_proto(), &encoded)?;
    for datum in again.loss_fn_outputs.iter().take(100) {
        for name in datum.names() {
            datum.tensor(name).ok_or("the tensor of a listed name is missing")?;
        }
    }
    Ok(())
}

fn sample_proto(bytes: &Bytes) -> Result<(), String> {
    let Ok(response) = SampleResponse::from_proto(bytes) else {
        return Ok(());
    };
    let again =
        SampleResponse::from_proto(&response.to_proto()).map_err(|error| error.to_string())?;
    same(&again, &response)?;
    for topk in response.sequences.iter().filter_map(|s| s.topk_logprobs.as_ref()) {
        topk.rows().take(100).for_each(|row| drop(row.map(Iterator::collect::<Vec<_>>)));
    }
    Ok(())
}

fn zstd(bytes: &Bytes) -> Result<(), String> {
    match codec::compress::decompress(bytes, MAX_DECOMPRESSED) {
        Ok(body) if body.len() > MAX_DECOMPRESSED => {
            Err("the decompressed body exceeds the limit".to_owned())
        }
        _ => Ok(()),
    }
}

fn poll_response(bytes: &Bytes) -> Result<(), String> {
    let _ = PollResponse::decode_timeout(bytes);
    let _ = ErrorBody::message(bytes);
    let Ok(response) = PollResponse::decode("application/json", bytes) else {
        return Ok(());
    };
    let (content_type, body) = response.encode(&"r".into());
    match (&response, PollResponse::decode(content_type, &body)) {
        // A missing queue state is encoded as active, and the content of a wrapper may be any JSON,
        // including another wrapper.
        (PollResponse::TryAgain(_), Ok(PollResponse::TryAgain(_)))
        | (PollResponse::Ready(_), Ok(_)) => Ok(()),
        (_, again) => same(&again, &Ok(response)),
    }
}

fn text(bytes: &Bytes) -> Result<(), String> {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(path) = text.parse::<TinkerPath>() {
        same(&path.to_string().parse(), &Ok(path))?;
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        same(&time.to_string().parse(), &Ok(time))?;
    }
    if let Ok(handle) = SamplerHandle::from_text(&text) {
        same(&SamplerHandle::from_text(&handle.to_text()), &Ok(handle))?;
    }
    for method in ["GET", "POST", "PUT", "DELETE"] {
        if let Some(found) = Route::find(method, &text) {
            let params: Vec<&str> = found.params.iter().map(String::as_str).collect();
            let path = found.route.path(&params);
            let Ok(path) = path else { continue };
            same(&Route::find(method, &path), &Some(found))?;
        }
    }
    let dmel = InputChunk::dmel(bytes.clone());
    let _ = dmel.token_count();
    Ok(())
}

/// Decodes queries, as a server does.
fn queries(bytes: &Bytes) -> Result<(), String> {
    fn one<T: DeserializeOwned + Serialize>(text: &str) -> Result<(), String> {
        let Ok(query) = codec::query::decode::<T>(text) else { return Ok(()) };
        let encoded = codec::query::encode(&query).map_err(|error| error.to_string())?;
        let again = codec::query::decode::<T>(&encoded).map_err(|error| error.to_string())?;
        same(&codec::query::encode(&again).map_err(|error| error.to_string())?, &encoded)
    }

    let text = String::from_utf8_lossy(bytes);
    let text = text.split_once('?').map_or(&*text, |(_, query)| query);
    one::<ListTrainingRuns>(text)?;
    one::<ListUserCheckpoints>(text)?;
    one::<ListSessions>(text)?;
    one::<ScopeQuery>(text)?;
    one::<BillingUsageRequest>(text)?;
    one::<StorageUsageRequest>(text)?;
    one::<AuditLogRequest>(text)
}

/// Decodes responses and results, as a client does.
fn responses(bytes: &Bytes) -> Result<(), String> {
    for payload in [ResultPayload::Json(bytes.clone()), ResultPayload::Proto(bytes.clone())] {
        let _ = CreateModel::decode_output(&payload);
        let _ = ForwardBackward::decode_output(&payload);
        let _ = LoadWeights::decode_output(&payload);
        let _ = SampleRequest::decode_output(&payload);
    }
    let _ = SessionCreated::from_body(bytes);
    let _ = ModelInfo::from_body(bytes);
    Ok(())
}

macro_rules! targets {
    ($($type:ty),* $(,)?) => {
        &[
            ("request_proto", request_proto as Target),
            ("output_proto", output_proto),
            ("sample_proto", sample_proto),
            ("zstd", zstd),
            ("poll_response", poll_response),
            ("text", text),
            ("queries", queries),
            ("responses", responses),
            $((stringify!($type), json::<$type>),)*
        ]
    };
}

/// All decoders, by name.
pub(crate) const TARGETS: &[(&str, Target)] = targets![
    ApiKeyInfo,
    AuditLog,
    AuthToken,
    AuthTokenRequest,
    BillingUsage,
    CancelFuture,
    CheckpointTtl,
    CheckpointPage,
    ClientConfig,
    ClientConfigRequest,
    CopyWeights,
    CreateCustomLoss,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    CustomLossCreated,
    DimuonParams,
    DynamicConfig,
    DynamicConfigRequest,
    ErrorBody,
    ExternalWeightsSaved,
    ExternalWeightsUrls,
    FinishDetails,
    ForwardBackwardOutput,
    FuturesRetrieved,
    GetInfo,
    Health,
    HeartbeatAcknowledged,
    JoinSamplingSession,
    LoadWeights,
    ModelCreated,
    ModelInfo,
    OptimStep,
    OptimStepOutput,
    OptimizerConfig,
    RetrieveFuture,
    RetrieveFutures,
    SampleRequest,
    SampleResponse,
    SamplerInfo,
    SamplerWeightsSaved,
    SamplingSessionCreated,
    SamplingSessionJoined,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    SearchSessions,
    ServerCapabilities,
    SessionCreated,
    SessionHeartbeat,
    SessionInfo,
    SessionProject,
    SessionPage,
    SessionSearchPage,
    StorageUsage,
    TelemetryBatch,
    TelemetryResponse,
    TensorData,
    SubmitResponse,
    TraceExport,
    TrainingRun,
    TrainingRunPage,
    WeightsCopied,
    WeightsInfo,
    WeightsInfoRequest,
    WeightsLoaded,
    WeightsSaved,
];
