//! [`RequestClient`]: the client of a request, also behind a reverse proxy.
//!
//! A proxy names its client in the headers `x-forwarded-for` and `x-forwarded-proto`, or
//! `forwarded` (RFC 7239). Any client can send these headers, so they count only if the connection
//! comes from a trusted proxy.

use std::net::{IpAddr, SocketAddr};

use http::HeaderMap;
use http::header::HOST;
use http::request::Parts;

use crate::ip_network::IpNetwork;
use crate::public_url::PublicUrl;

const FORWARDED: &str = "forwarded";
const FORWARDED_FOR: &str = "x-forwarded-for";
const FORWARDED_PROTO: &str = "x-forwarded-proto";

/// The other end of a connection. Each request that arrived on a connection has it as an extension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionPeer {
    pub(crate) address: SocketAddr,
    /// Whether the connection is encrypted.
    pub(crate) tls: bool,
}

/// The client of a request. `handle` adds it to every request as an extension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestClient {
    /// Address of the client; `None` for a request of a simulation.
    pub(crate) address: Option<IpAddr>,
    /// Whether the client uses TLS, with this server or with a trusted proxy.
    pub(crate) is_secure: bool,
    /// Whether the client is a program of this machine.
    pub(crate) is_local: bool,
}

impl RequestClient {
    /// Finds the client of a request, and adds it to the request's extensions.
    pub(crate) fn identify(parts: &mut Parts, trusted: &[IpNetwork]) {
        let Some(peer) = parts.extensions.get::<ConnectionPeer>().copied() else { return };
        let client = Self::find(peer, &parts.headers, trusted);
        parts.extensions.insert(client);
    }

    /// Returns the client of a request.
    pub(crate) fn of(parts: &Parts) -> Self {
        parts.extensions.get().copied().unwrap_or_default()
    }

    fn find(peer: ConnectionPeer, headers: &HeaderMap, trusted: &[IpNetwork]) -> Self {
        // A socket for IPv6 and IPv4 has addresses such as ::ffff:127.0.0.1.
        let peer_address = peer.address.ip().to_canonical();
        let names = [FORWARDED, FORWARDED_FOR, FORWARDED_PROTO];
        let is_forwarded = names.iter().any(|name| headers.contains_key(*name));
        let is_trusted = |address: IpAddr| trusted.iter().any(|net| net.contains(address));
        let mut client = Self {
            address: Some(peer_address),
            is_secure: peer.tls,
            // A proxy on this machine forwards requests of other machines.
            is_local: peer_address.is_loopback() && !is_forwarded,
        };
        if !is_trusted(peer_address) {
            return client;
        }
        let elements = list(headers, FORWARDED);
        let (addresses, scheme) = if headers.contains_key(FORWARDED_FOR) || elements.is_empty() {
            (list(headers, FORWARDED_FOR), list(headers, FORWARDED_PROTO).pop())
        } else {
            let for_ = elements.iter().map(|element| parameter(element, "for"));
            let proto = elements.last().map(|element| parameter(element, "proto"));
            (for_.collect(), proto)
        };
        // Each proxy appends the address of its client: the last address that is not a trusted
        // proxy is the client. An address before it is the client's own claim.
        for text in addresses.iter().rev() {
            let Some(address) = parse_address(text) else { break };
            client.address = Some(address);
            if !is_trusted(address) {
                break;
            }
        }
        if let Some(scheme) = scheme.filter(|scheme| !scheme.is_empty()) {
            client.is_secure = scheme.eq_ignore_ascii_case("https");
        }
        client
    }
}

/// Returns the URL by which the client of a request reaches this server: the public URL, or else the
/// host of the request.
pub(super) fn server_url(parts: &Parts, public: Option<&PublicUrl>) -> String {
    if let Some(url) = public {
        return url.to_string();
    }
    let scheme = if RequestClient::of(parts).is_secure { "https" } else { "http" };
    let host = parts.headers.get(HOST).and_then(|host| host.to_str().ok());
    format!("{scheme}://{}", host.unwrap_or("127.0.0.1"))
}

/// Returns the elements of a header whose value is a list, over all headers of that name.
fn list(headers: &HeaderMap, name: &str) -> Vec<String> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(|part| part.trim().to_owned()).collect()
}

/// Returns a parameter of an element of the header `forwarded`, such as `for=192.0.2.1;proto=https`.
fn parameter(element: &str, name: &str) -> String {
    let pairs = element.split(';').filter_map(|pair| pair.split_once('='));
    let mut values = pairs.filter(|(key, _)| key.trim().eq_ignore_ascii_case(name));
    values.next().map_or_else(String::new, |(_, value)| value.trim().trim_matches('"').to_owned())
}

/// Parses an address with or without a port. An obfuscated name, such as `_hidden`, is no address.
fn parse_address(text: &str) -> Option<IpAddr> {
    let socket = text.parse::<SocketAddr>().map(|address| address.ip());
    let bare = || text.trim_matches(['[', ']']).parse::<IpAddr>();
    socket.or_else(|_| bare()).ok().map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(peer: &str, headers: &[(&'static str, &str)], trusted: &[&str]) -> RequestClient {
        let pair = |(name, value): &(&'static str, &str)| {
            (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap())
        };
        let headers: HeaderMap = headers.iter().map(pair).collect();
        let trusted: Vec<IpNetwork> = trusted.iter().map(|text| text.parse().unwrap()).collect();
        let address = peer.parse().unwrap();
        RequestClient::find(ConnectionPeer { address, tls: false }, &headers, &trusted)
    }

    #[test]
    fn forwarded_headers_count_only_from_a_trusted_proxy() {
        let proxy = "10.0.0.7:4000";
        let trusted = ["10.0.0.0/8", "127.0.0.1"];
        let https = ("x-forwarded-proto", "https");
        for (headers, address, secure) in [
            (vec![], "10.0.0.7", false),
            (vec![("x-forwarded-for", "192.0.2.1")], "192.0.2.1", false),
            (vec![("x-forwarded-for", "192.0.2.1"), https], "192.0.2.1", true),
            // The client claims to be 203.0.113.9; a second trusted proxy is in between.
            (vec![("x-forwarded-for", "203.0.113.9, 192.0.2.1, 10.0.0.8")], "192.0.2.1", false),
            (vec![("x-forwarded-for", "127.0.0.1, 192.0.2.1")], "192.0.2.1", false),
            (vec![("x-forwarded-for", "192.0.2.1:99")], "192.0.2.1", false),
            (vec![("x-forwarded-for", "unknown")], "10.0.0.7", false),
            (vec![("x-forwarded-for", "[2001:db8::1]:99")], "2001:db8::1", false),
            (vec![("forwarded", "for=192.0.2.1;proto=https")], "192.0.2.1", true),
            (vec![("forwarded", "for=1.1.1.1, For=\"[2001:db8::1]:4\"")], "2001:db8::1", false),
            // A client cannot override the header that the proxy sets by the other header.
            (
                vec![("forwarded", "for=1.1.1.1"), ("x-forwarded-for", "192.0.2.1")],
                "192.0.2.1",
                false,
            ),
            (vec![https], "10.0.0.7", true),
            (vec![("x-forwarded-proto", "https, http")], "10.0.0.7", false),
        ] {
            let found = client(proxy, &headers, &trusted);
            assert_eq!(found.address, Some(address.parse().unwrap()), "{headers:?}");
            assert_eq!((found.is_secure, found.is_local), (secure, false), "{headers:?}");
            let untrusted = client(proxy, &headers, &["127.0.0.1"]);
            assert_eq!(untrusted.address, Some([10, 0, 0, 7].into()), "{headers:?}");
            assert!(!untrusted.is_secure, "{headers:?}");
        }
    }

    #[test]
    fn a_request_through_a_proxy_of_this_machine_is_not_local() {
        assert!(client("127.0.0.1:1", &[], &[]).is_local);
        assert!(client("[::ffff:127.0.0.1]:1", &[], &[]).is_local);
        assert!(!client("127.0.0.1:1", &[("x-forwarded-for", "127.0.0.1")], &[]).is_local);
        assert!(!client("192.0.2.1:1", &[], &[]).is_local);
    }
}
