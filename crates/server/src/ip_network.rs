//! [`IpNetwork`]: a range of IP addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A range of IP addresses, such as `10.0.0.0/8` or `2001:db8::/32`, or one address.
///
/// ```
/// use tinkex_server::IpNetwork;
///
/// let network: IpNetwork = "10.0.0.0/8".parse()?;
/// assert!(network.contains([10, 1, 2, 3].into()));
/// assert!(!network.contains([11, 1, 2, 3].into()));
/// # Ok::<_, String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpNetwork {
    address: IpAddr,
    /// Number of leading bits that the addresses have in common.
    prefix: u8,
}

impl IpNetwork {
    /// Returns whether the range contains an address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let shift = 32 - u32::from(self.prefix);
                let difference = network.to_bits() ^ address.to_bits();
                difference.checked_shr(shift).unwrap_or(0) == 0
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let shift = 128 - u32::from(self.prefix);
                let difference = network.to_bits() ^ address.to_bits();
                difference.checked_shr(shift).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for IpNetwork {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected an IP address or a range such as 10.0.0.0/8".to_owned();
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| expected())?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => prefix.parse().map_err(|_| expected())?,
            None => bits,
        };
        if prefix > bits {
            return Err(format!("the prefix length is at most {bits}"));
        }
        let IpAddr::V6(v6) = address else { return Ok(Self { address, prefix }) };
        // `contains` compares canonical addresses.
        match (v6.to_ipv4_mapped(), prefix.checked_sub(96)) {
            (None, _) => Ok(Self { address, prefix }),
            (Some(v4), Some(prefix)) => Ok(Self { address: v4.into(), prefix }),
            (Some(_), None) => {
                Err("the prefix length of an IPv4-mapped address is at least 96".to_owned())
            }
        }
    }
}

impl fmt::Display for IpNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_contains_the_addresses_with_its_prefix() {
        for (network, address, contained) in [
            ("192.0.2.1", "192.0.2.1", true),
            ("192.0.2.1", "192.0.2.2", false),
            ("192.0.2.0/24", "192.0.2.255", true),
            ("192.0.2.0/24", "192.0.3.0", false),
            ("0.0.0.0/0", "203.0.113.1", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "2001:db8::1", true),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("127.0.0.0/8", "::ffff:127.0.0.9", true),
            ("::ffff:10.0.0.0/104", "10.1.2.3", true),
            ("::ffff:10.0.0.0/104", "::ffff:10.1.2.3", true),
            ("::ffff:10.0.0.0/104", "11.1.2.3", false),
            ("::ffff:10.0.0.1", "10.0.0.1", true),
        ] {
            let parsed: IpNetwork = network.parse().unwrap();
            assert_eq!(parsed.contains(address.parse().unwrap()), contained, "{network} {address}");
        }
        for invalid in [
            "",
            "localhost",
            "10.0.0.0/33",
            "::1/129",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "::ffff:10.0.0.0/95",
        ] {
            assert!(invalid.parse::<IpNetwork>().is_err(), "{invalid}");
        }
    }
}
