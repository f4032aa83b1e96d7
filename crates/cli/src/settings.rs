//! Flags over the environment, and the client they make.

use tinkex::{RetryPolicy, ServiceClient, ServiceClientBuilder};

use crate::args::{Colour, Globals};
use crate::failure::Failure;
use crate::world::World;

/// A client as the flags and the environment want it. Nothing is sent yet.
pub(crate) fn client(world: &World, globals: &Globals) -> Result<ServiceClient, Failure> {
    let client = base(world, globals);
    let key = match (&globals.api_key_file, &globals.api_key) {
        (Some(file), _) => {
            let text = std::fs::read_to_string(file)
                .map_err(|why| Failure::file("read", &file.display().to_string(), &why))?;
            Some(text.trim().to_owned())
        }
        (None, key) => key.clone(),
    };
    Ok(key.into_iter().fold(client, ServiceClientBuilder::api_key).build()?)
}

fn base(world: &World, globals: &Globals) -> ServiceClientBuilder {
    let retry = if globals.retry_for.is_zero() {
        RetryPolicy::disabled()
    } else {
        RetryPolicy::default().within(globals.retry_for)
    };
    let mut client = ServiceClient::builder()
        .env(world.env.clone())
        .retry(retry)
        // A short command must not wait for its own news to leave.
        .without_telemetry();
    if let Some(url) = &globals.base_url {
        client = client.base_url(url.clone());
    }
    (world.prepare)(client)
}

/// Whether results are coloured.
pub(crate) fn colours(world: &World, globals: &Globals) -> bool {
    match globals.color {
        _ if globals.no_color => false,
        Colour::Always => true,
        Colour::Never => false,
        Colour::Auto => {
            let forced = world.env.get("CLICOLOR_FORCE").is_some_and(|value| value != "0");
            world.env.get("NO_COLOR").is_none() && (world.terminals.out.is_some() || forced)
        }
    }
}
