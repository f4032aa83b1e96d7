//! A web service on axum that completes text and streams the answer as server-sent events.
//!
//! ```sh
//! cargo run -p tinkex-examples --bin streaming_service -- 127.0.0.1:3000
//! curl -N localhost:3000/complete -d '{"prompt": "The cow says"}' -H 'content-type: application/json'
//! ```

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::convert::Infallible;
use std::error::Error;

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, Sse};
use axum::routing::post;
use futures_util::stream::{Stream, StreamExt as _, once};
use serde::Deserialize;
use serde_json::json;
use tinkex::{ErrorKind, SamplingClient, SamplingParams, ServiceClient, Tokenizer};

/// State shared by all requests. Clones are cheap: they use the same connections and limits.
#[derive(Clone)]
struct Service {
    sampler: SamplingClient,
    tokenizer: Tokenizer,
}

/// Body of a request.
#[derive(Deserialize)]
struct Completion {
    prompt: String,
    #[serde(default = "default_max_tokens")]
    max_tokens: u32,
    #[serde(default)]
    seed: u64,
}

fn default_max_tokens() -> u32 {
    32
}

/// Error response: a status and a message.
type Rejection = (StatusCode, String);

fn rejection(error: &tinkex::Error) -> Rejection {
    let status = match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::Rejected => StatusCode::BAD_REQUEST,
        ErrorKind::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::BAD_GATEWAY,
    };
    (status, error.to_string())
}

async fn complete(
    State(service): State<Service>,
    Json(completion): Json<Completion>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Rejection> {
    let Completion { prompt, max_tokens, seed } = completion;
    let prompt = service.tokenizer.input(&prompt).map_err(|error| rejection(&error))?;
    let params = SamplingParams::new().max_tokens(max_tokens).seed(seed);
    // If the client disconnects, axum drops the stream, which cancels the sample on the server.
    let mut tokens = service.sampler.sample_stream(prompt, params);
    // Wait for the first token: until then an error can still set the response status.
    let first = tokens.next().await.transpose().map_err(|error| rejection(&error))?;
    let tokens = once(async { first.map(Ok) }).filter_map(|first| async { first }).chain(tokens);
    Ok(Sse::new(tokens.map(|token| {
        Ok(match token {
            Ok(token) => {
                let reason = token.stop_reason.map(|reason| reason.as_str());
                let data = json!({"text": token.text, "stop_reason": reason});
                Event::default().data(data.to_string())
            }
            Err(error) => Event::default().event("error").data(error.to_string()),
        })
    })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("usage: streaming_service ADDRESS")?;
    let service = ServiceClient::from_env()?; // TINKER_BASE_URL, TINKER_API_KEY
    let sampler = service.create_sampling_client("tinkex/tiny").await?;
    let tokenizer = sampler.tokenizer().await?;
    let routes = Router::new().route("/complete", post(complete));
    let routes = routes.with_state(Service { sampler, tokenizer });
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let stopped = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    axum::serve(listener, routes).with_graceful_shutdown(stopped).await?;
    service.finish().await;
    Ok(())
}
