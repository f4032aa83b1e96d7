//! What holds for the public types by themselves.

use tinkex::{AdminClient, Error, RestClient, ServiceClient};

#[test]
fn clients_are_cheap_and_can_be_shared() {
    fn shared<T: Send + Sync + Clone + std::fmt::Debug + 'static>() {}
    shared::<ServiceClient>();
    shared::<RestClient>();
    shared::<AdminClient>();
    fn sent<T: Send + Sync + std::error::Error + 'static>() {}
    sent::<Error>();
    assert_eq!(size_of::<ServiceClient>(), size_of::<usize>());
    assert_eq!(size_of::<Error>(), size_of::<usize>());
}

#[test]
fn calls_can_be_spawned_and_stay_small() {
    fn check<F: Future + Send>(call: &F) {
        assert!(size_of_val(call) < 8 * 1024, "{} bytes", size_of_val(call));
    }
    let fake = crate::scripted_server::ScriptedServer::new();
    let rest = fake.client().rest();
    check(&rest.list_sessions(&Default::default()));
    check(&rest.export_session_trace("s"));
}
