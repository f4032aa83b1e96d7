//! Names under which samples are logged.

use tinkex_wire::ModelId;

use crate::weights::{RemoteWeights, WeightsLocation};

/// Returns the prefix of the names of the adapter folders of a run.
#[must_use]
pub fn folder_prefix(run: &str) -> String {
    let name = run.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
    format!("{name}-")
}

/// Returns the name under which samples from the weights of a run are logged. Folders of this
/// server start with the name of their run; weights on an upstream get the name as a prefix.
#[must_use]
pub fn logged_folder(run: Option<&ModelId>, weights: &WeightsLocation) -> String {
    match weights {
        WeightsLocation::Local(folder) => folder.clone(),
        WeightsLocation::Upstream(RemoteWeights { upstream, path }) => {
            let prefix = run.map(|run| folder_prefix(run.as_str())).unwrap_or_default();
            format!("{prefix}{upstream}>{path}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_logged_under_the_name_of_their_run() {
        assert_eq!(folder_prefix("ab-1:train:0"), "ab-1_train_0-");
        assert!(!"ab-1_train_01-weights".starts_with(&folder_prefix("ab-1:train:0")));
        let run = ModelId::from("ab-1:train:0");
        let upstream = "up".to_owned();
        let path = "tinker://m/weights/a".to_owned();
        let remote = WeightsLocation::Upstream(RemoteWeights { upstream, path });
        let logged = "ab-1_train_0-up>tinker://m/weights/a";
        assert_eq!(logged_folder(Some(&run), &remote), logged);
        let local = WeightsLocation::Local("ab-1_train_0-weights-a".to_owned());
        assert_eq!(logged_folder(Some(&run), &local), "ab-1_train_0-weights-a");
        assert_eq!(logged_folder(None, &remote), "up>tinker://m/weights/a");
    }
}
