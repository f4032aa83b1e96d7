//! Headers of requests and responses.

use ::http::header::USER_AGENT;
use ::http::{HeaderMap, HeaderName, HeaderValue};
use tinkex_wire::Secret;

use crate::config::Env;
use crate::error::{Error, ErrorKind, Result};

/// Value of the `user-agent` header.
pub const USER_AGENT_VALUE: &str = concat!("tinkex/", env!("CARGO_PKG_VERSION"), " (Rust)");
/// Header with the number of retries so far, as the Python SDK sends it.
pub(crate) const RETRY_COUNT: &str = "x-stainless-retry-count";
/// Header with the timeout of the attempt in seconds, as the Python SDK sends it.
pub(crate) const READ_TIMEOUT: &str = "x-stainless-read-timeout";

/// Returns the headers of every request: the client's identification, credentials for a Cloudflare
/// Access proxy from `env`, and `overrides`, which replace headers of the same name.
///
/// # Errors
/// [`ErrorKind::Config`] if a name or value is not valid in a header.
pub fn default_headers(env: &Env, overrides: &[(String, String)]) -> Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    headers.insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
    for (name, value) in [
        ("x-stainless-package-version", tinkex_wire::SDK_VERSION),
        ("x-stainless-os", os()),
        ("x-stainless-arch", arch_name(std::env::consts::ARCH)),
        ("x-stainless-runtime", "Rust"),
        ("x-stainless-runtime-version", env!("CARGO_PKG_RUST_VERSION")),
        ("x-stainless-async", "async:tokio"),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    for (name, variable) in [
        ("cf-access-client-id", "CLOUDFLARE_ACCESS_CLIENT_ID"),
        ("cf-access-client-secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
    ] {
        if let Some(value) = env.get(variable) {
            put_secret(&mut headers, name, &value.into())?;
        }
    }
    for (name, value) in overrides {
        put_secret(&mut headers, name, &value.as_str().into())?;
    }
    Ok(headers)
}

/// Returns the name of the operating system, as the Python SDK writes it.
pub fn os() -> &'static str {
    match std::env::consts::OS {
        "linux" => "Linux",
        "macos" => "MacOS",
        "windows" => "Windows",
        "freebsd" => "FreeBSD",
        "openbsd" => "OpenBSD",
        "ios" => "iOS",
        "android" => "Android",
        _ => "Unknown",
    }
}

/// Returns the name that the Python SDK has for a CPU architecture of [`std::env::consts::ARCH`].
fn arch_name(arch: &str) -> &'static str {
    match arch {
        "x86_64" => "x64",
        "aarch64" => "arm64",
        "arm" => "arm",
        "x86" => "x32",
        _ => "unknown",
    }
}

/// Sets a header. `value` must be visible ASCII, as names, numbers and ids are.
///
/// # Panics
/// If `value` contains other characters.
pub fn put(headers: &mut HeaderMap, name: &'static str, value: &str) {
    let value = HeaderValue::from_str(value).expect("value is visible ASCII");
    headers.insert(HeaderName::from_static(name), value);
}

/// Sets a header whose value is a secret. `Debug` output and errors do not show the value.
///
/// # Errors
/// [`ErrorKind::Config`] if `name` or `value` is not valid in a header.
pub fn put_secret(headers: &mut HeaderMap, name: &str, value: &Secret) -> Result<()> {
    let invalid =
        |cause: &str| Error::new(ErrorKind::Config, format!("invalid header {name:?}: {cause}"));
    let name: HeaderName = name.parse().map_err(|_| invalid("not a header name"))?;
    let mut value = HeaderValue::from_str(value.expose())
        .map_err(|_| invalid("the value contains characters that headers do not allow"))?;
    value.set_sensitive(true);
    headers.insert(name, value);
    Ok(())
}

/// Logs the deprecation notice of a response, if it has one.
pub(crate) fn log_deprecation(headers: &HeaderMap) {
    let text = |name: &str| headers.get(name)?.to_str().ok().map(str::trim);
    let Some(note) = text("x-deprecation-note") else { return };
    match text("x-deprecation-level") {
        Some(level) if level.eq_ignore_ascii_case("error") => {
            tracing::error!(note, "request is deprecated");
        }
        _ => tracing::warn!(note, "request is deprecated"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_have_the_names_of_the_python_sdk() {
        let known = [("x86_64", "x64"), ("aarch64", "arm64"), ("arm", "arm"), ("x86", "x32")];
        for (arch, name) in known {
            assert_eq!(arch_name(arch), name);
        }
        assert_eq!(arch_name("riscv64"), "unknown");
    }
}
