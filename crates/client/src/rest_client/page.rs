//! Paginated lists as streams.

use futures_util::stream::{Stream, TryStreamExt, iter, try_unfold};

use crate::error::{Error, Result};

/// One page of a list, and the total number of items if known.
pub(super) struct ListPage<T> {
    pub(super) items: Vec<T>,
    pub(super) total: Option<u64>,
}

/// Returns a stream of all items from `offset` on, fetching pages of `page_size` items on demand.
///
/// `fetch` takes offset and limit. A page with fewer items than the limit is the last one,
/// regardless of the total.
pub(super) fn all<T, F>(
    offset: u64,
    page_size: u64,
    fetch: impl Fn(u64, u64) -> F,
) -> impl Stream<Item = Result<T>>
where
    F: Future<Output = Result<ListPage<T>>>,
{
    let pages = try_unfold(Some(offset), move |at| {
        let fetched = at.map(|at| (at, fetch(at, page_size)));
        async move {
            let Some((at, fetched)) = fetched else { return Ok::<_, Error>(None) };
            let ListPage { items, total } = fetched.await?;
            let count = items.len() as u64;
            let next = at + count;
            let last = count < page_size || total.is_none_or(|total| next >= total);
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
    async fn pages_are_fetched_until_one_is_short() {
        for (count, total, expected) in [
            (0, Some(0), vec![(0, 3)]),
            (2, Some(2), vec![(0, 3)]),
            (3, Some(3), vec![(0, 3)]),
            (7, Some(7), vec![(0, 3), (3, 3), (6, 3)]),
            (4, Some(99), vec![(0, 3), (3, 3)]),
            (3, None, vec![(0, 3)]),
        ] {
            let requested = Mutex::new(Vec::new());
            let items = all(0, 3, |offset, limit| {
                requested.lock().unwrap().push((offset, limit));
                let items: Vec<u64> = (offset..count).take(3).collect();
                std::future::ready(Ok(ListPage { items, total }))
            });
            let items: Vec<u64> = items.try_collect().await.unwrap();
            assert_eq!(items, (0..count).collect::<Vec<_>>());
            assert_eq!(requested.into_inner().unwrap(), expected);
        }
    }
}
