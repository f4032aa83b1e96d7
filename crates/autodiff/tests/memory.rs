//! Memory of evaluations, measured with a counting allocator.

#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a wrong assumption is a failed test")]

use parking_lot::Mutex;
use peak_alloc::PeakAlloc;
use tinkex_autodiff::{GraphArg, GraphInput, GraphNode, LossGraph, LossProgram, TensorView};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The allocator counts for the whole process: only one test may allocate at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;

/// Evaluates a graph of these nodes and the sum of `last` for `count` log-probabilities. Returns
/// the error, if any, and the memory of the evaluation at its peak in MiB.
fn evaluate(
    nodes: Vec<GraphNode>,
    last: &str,
    count: usize,
    limit: usize,
) -> (Option<String>, usize) {
    let _guard = ONE_AT_A_TIME.lock();
    let mut all = vec![GraphNode::placeholder("logprobs")];
    all.extend(nodes);
    all.push(GraphNode::method("loss", "sum", [GraphArg::node(last)]));
    all.push(GraphNode::output(GraphArg::node("loss"), []));
    let program = LossProgram::new(vec![GraphInput::new("logprobs", 1)], LossGraph::new(all));
    let program = program.unwrap().memory_limit(limit);
    let logprobs = vec![-0.5; count];
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    let result = program.evaluate(&[TensorView::f32(&[count], &logprobs)]);
    let peak = ALLOCATOR.peak_usage() - before;
    (result.err().map(|error| error.to_string()), peak / MIB)
}

fn names(prefix: &str, count: usize) -> impl Iterator<Item = String> {
    (0..count).map(move |i| format!("{prefix}{i}"))
}

#[test]
fn a_concatenation_needs_no_index_map_for_each_part() {
    // 400 parts of 16 Ki elements: 50 MiB, and as much for the gradient of the result.
    let parts: Vec<GraphArg> = vec![GraphArg::node("logprobs"); 400];
    for (name, last) in [("torch.cat", "joined"), ("torch.stack", "joined")] {
        let joined = GraphNode::function("joined", name, [GraphArg::from(parts.clone())]);
        let (error, peak) = evaluate(vec![joined], last, 16 << 10, 256 * MIB);
        assert_eq!(error, None);
        assert!(peak < 120, "{name}: {peak} MiB");
    }
}

#[test]
fn reductions_need_no_index_maps() {
    // 1,000 sums of 1 Mi elements: the index maps would need 8 GiB.
    let sums = names("sum", 1_000);
    let mut nodes: Vec<GraphNode> =
        sums.map(|name| GraphNode::method(&name, "sum", [GraphArg::node("logprobs")])).collect();
    let all: Vec<GraphArg> = names("sum", 1_000).map(|name| GraphArg::node(&name)).collect();
    nodes.push(GraphNode::function("all", "torch.stack", [GraphArg::from(all)]));
    let (error, peak) = evaluate(nodes, "all", MIB, 64 * MIB);
    assert_eq!(error, None);
    assert!(peak < 40, "{peak} MiB");
}

#[test]
fn an_evaluation_beyond_its_limit_fails_before_it_allocates() {
    // Each has as many slopes as its operand has elements.
    let nodes = names("max", 1_000)
        .map(|name| GraphNode::method(&name, "amax", [GraphArg::node("logprobs")]))
        .collect();
    let (error, peak) = evaluate(nodes, "max0", MIB, 100 * MIB);
    let error = error.unwrap();
    assert!(error.contains("needs more than 100 MiB of memory"), "{error}");
    assert!(peak <= 101, "{peak} MiB");
    // One operation that would exceed the limit alone.
    let size = GraphArg::from(vec![GraphArg::from(1 << 20), GraphArg::from(1 << 20)]);
    let node = GraphNode::method("wide", "expand", [GraphArg::node("logprobs"), size]);
    let (error, peak) = evaluate(vec![node], "wide", MIB, 100 * MIB);
    assert!(error.unwrap().contains("too large"));
    assert!(peak <= 20, "{peak} MiB");
}

#[test]
fn memory_is_limited_over_all_nodes_together() {
    // Each node alone would be within the limit: 32 MiB, and as much for its gradient.
    let expand = |name: &str| {
        let sizes = [GraphArg::node("logprobs"), GraphArg::from(1 << 16), GraphArg::from(64)];
        GraphNode::method(name, "expand", sizes)
    };
    let (error, _) = evaluate(vec![expand("a")], "a", 64, 100 * MIB);
    assert_eq!(error, None);
    let (error, peak) = evaluate(vec![expand("a"), expand("b")], "b", 64, 80 * MIB);
    assert!(error.unwrap().contains("too large"));
    assert!(peak <= 80, "{peak} MiB");
}

#[test]
fn lists_of_references_to_lists_do_not_grow_exponentially() {
    let mut nodes = Vec::new();
    let mut previous = "size".to_owned();
    nodes.push(GraphNode::method("size", "size", [GraphArg::node("logprobs")]));
    for name in names("list", 30) {
        // 1,000 references to the previous list: 1,000³⁰ items in all.
        let list = GraphArg::from(vec![GraphArg::node(&previous); 1_000]);
        let all = GraphArg::slice(None, None, None);
        nodes.push(GraphNode::function(&name, "operator.getitem", [list, all]));
        previous = name;
    }
    let (error, peak) = evaluate(nodes, "logprobs", 4, 64 * MIB);
    assert_eq!(error, None);
    assert!(peak < 10, "{peak} MiB");
    // Copies of a long list count.
    let long = GraphArg::from(vec![GraphArg::node("logprobs"); 100_000]);
    let all = || GraphArg::slice(None, None, None);
    let mut nodes = vec![GraphNode::function("list", "operator.getitem", [long, all()])];
    nodes.extend(names("copy", 1_000).map(|name| {
        GraphNode::function(&name, "operator.getitem", [GraphArg::node("list"), all()])
    }));
    let (error, peak) = evaluate(nodes, "logprobs", 4, 64 * MIB);
    assert!(error.unwrap().contains("needs more than 64 MiB"));
    assert!(peak <= 80, "{peak} MiB");
}

#[test]
fn a_tensor_has_a_limited_number_of_dimensions() {
    let index = GraphArg::tuple(vec![GraphArg::None; 65]);
    let node = GraphNode::function("wide", "operator.getitem", [GraphArg::node("logprobs"), index]);
    let (error, _) = evaluate(vec![node], "wide", 4, MIB);
    assert!(error.unwrap().contains("at most 64 dimensions"));
}
