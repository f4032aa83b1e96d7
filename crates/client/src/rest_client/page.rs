//! Lists that come in pages, as one stream.

use futures_util::stream::{Stream, TryStreamExt, iter, try_unfold};

use crate::error::{Error, Result};

/// One page: its items, and how many there are in all, if the server says.
pub(super) struct Page<T> {
    pub(super) items: Vec<T>,
    pub(super) total: Option<u64>,
}

/// All items, page by page, as they are asked for.
///
/// `fetch` gets how many to skip and how many to bring. A page that is shorter than asked for is
/// the last one, whatever the total claims.
pub(super) fn all<T, F>(
    offset: u64,
    page: u64,
    fetch: impl Fn(u64, u64) -> F,
) -> impl Stream<Item = Result<T>>
where
    F: Future<Output = Result<Page<T>>>,
{
    let pages = try_unfold(Some(offset), move |at| {
        let fetched = at.map(|at| (at, fetch(at, page)));
        async move {
            let Some((at, fetched)) = fetched else { return Ok::<_, Error>(None) };
            let Page { items, total } = fetched.await?;
            let got = items.len() as u64;
            let next = at + got;
            let last = got < page || total.is_none_or(|total| next >= total);
            Ok(Some((iter(items.into_iter().map(Ok)), (!last).then_some(next))))
        }
    });
    pages.try_flatten()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn pages_are_asked_for_until_one_is_short() {
        for (count, total, expected) in [
            (0, Some(0), vec![(0, 3)]),
            (2, Some(2), vec![(0, 3)]),
            (3, Some(3), vec![(0, 3)]),
            (7, Some(7), vec![(0, 3), (3, 3), (6, 3)]),
            (4, Some(99), vec![(0, 3), (3, 3)]),
            (3, None, vec![(0, 3)]),
        ] {
            let asked = Mutex::new(Vec::new());
            let items = all(0, 3, |offset, limit| {
                asked.lock().unwrap().push((offset, limit));
                let items: Vec<u64> = (offset..count).take(3).collect();
                std::future::ready(Ok(Page { items, total }))
            });
            let items: Vec<u64> = items.try_collect().await.unwrap();
            assert_eq!(items, (0..count).collect::<Vec<_>>());
            assert_eq!(asked.into_inner().unwrap(), expected);
        }
    }
}
