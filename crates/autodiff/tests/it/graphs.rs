//! Traced losses against `fixtures/semantics/custom_graphs.json` and against torch.

use std::collections::BTreeMap;

use serde_json::Value;
use tinkex_autodiff::{
    Error, GraphArg, GraphInput, GraphNode, LossEvaluation, LossGraph, LossProgram, TensorView,
};

use crate::json::{assert_close, floats, load, number, numbers, shape, to_f64};

fn graph_of(nodes: &Value) -> LossGraph {
    LossGraph::new(serde_json::from_value(nodes.clone()).unwrap())
}

#[test]
fn traced_losses_match_the_recorded_loss_metrics_and_gradient() {
    let fixture = load("../../fixtures/semantics/custom_graphs.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let inputs: Vec<GraphInput> = serde_json::from_value(case["inputs"].clone()).unwrap();
        let program = LossProgram::new(inputs, graph_of(&case["graph"]["nodes"])).unwrap();
        let mut total = 0.0;
        let mut metrics = BTreeMap::<String, Vec<f64>>::new();
        for (i, datum) in case["data"].as_array().unwrap().iter().enumerate() {
            let tensors: Vec<(Vec<usize>, Vec<f32>)> = program
                .inputs()
                .iter()
                .map(|input| (shape(&datum[&input.name]), floats(&datum[&input.name])))
                .collect();
            let views: Vec<TensorView<'_>> =
                tensors.iter().map(|(shape, values)| TensorView::f32(shape, values)).collect();
            let result = program.evaluate(&views).unwrap();
            total += result.loss;
            for (key, value) in result.metrics {
                metrics.entry(key).or_default().push(value);
            }
            let want = numbers(&case["expect"]["grad_logprobs"][i]);
            assert_close(name, &to_f64(&result.gradient), &want, 2e-6, 2e-6);
        }
        assert_close(name, &[total], &[number(&case["expect"]["loss_sum"])], 2e-6, 2e-6);
        for (key, want) in case["expect"]["metrics"].as_object().unwrap() {
            let values = &metrics[key];
            let sum: f64 = values.iter().sum();
            let got = if key.ends_with(":mean") { sum / values.len() as f64 } else { sum };
            assert_close(key, &[got], &[number(want)], 2e-6, 2e-6);
        }
    }
}

/// `graphs.json` contains values and gradients of every operation, computed by torch.
#[test]
fn every_operation_agrees_with_torch() {
    let cases = load("tests/golden/graphs.json");
    for (i, case) in cases.as_array().unwrap().iter().enumerate() {
        let what = format!("case {i}: {}", case["nodes"]);
        let sizes = shape(&case["logprobs"]);
        let rank = u8::try_from(sizes.len()).unwrap();
        let inputs = [("logprobs", rank), ("w", rank), ("m", rank), ("i", 1)];
        let inputs = inputs.map(|(name, rank)| GraphInput::new(name, rank)).to_vec();
        let program = LossProgram::new(inputs, graph_of(&case["nodes"]));
        let program = program.unwrap_or_else(|error| panic!("{what}: {error}"));
        let x = floats(&case["logprobs"]);
        let w = floats(&case["w"]);
        let integers = |key: &str| -> Vec<i64> {
            #[expect(clippy::cast_possible_truncation, reason = "small integers")]
            numbers(&case[key]).iter().map(|&n| n as i64).collect()
        };
        let mask = integers("m");
        let indices = integers("i");
        let result = program.evaluate(&[
            TensorView::f32(&sizes, &x),
            TensorView::f32(&sizes, &w),
            TensorView::i64(&sizes, &mask),
            TensorView::i64(&[3], &indices),
        ]);
        let result = result.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_close(&what, &[result.loss], &[number(&case["loss"])], 1e-6, 1e-6);
        assert_close(&what, &to_f64(&result.gradient), &numbers(&case["grad"]), 1e-6, 1e-6);
    }
}

fn logprobs(rank: u8) -> Vec<GraphInput> {
    vec![GraphInput::new("logprobs", rank)]
}

fn output_of(node: &str) -> GraphNode {
    GraphNode::output(GraphArg::node(node), [])
}

/// Builds a program with the input `logprobs` and these nodes, the last of which is the loss.
fn program(mut body: Vec<GraphNode>) -> Result<LossProgram, Error> {
    let last = body.last().map_or("logprobs".to_owned(), |node| node.name.clone());
    body.insert(0, GraphNode::placeholder("logprobs"));
    body.push(output_of(&last));
    LossProgram::new(logprobs(1), LossGraph::new(body))
}

fn run(body: Vec<GraphNode>, x: &[f32]) -> Result<LossEvaluation, Error> {
    program(body)?.evaluate(&[TensorView::f32(&[x.len()], x)])
}

/// Creates the node `y`, which calls a method of `logprobs`.
fn call(target: &str, args: Vec<GraphArg>) -> GraphNode {
    let args = [vec![GraphArg::node("logprobs")], args].concat();
    GraphNode::method("y", target, args)
}

fn sum_of(node: &str) -> GraphNode {
    GraphNode::method("z", "sum", [GraphArg::node(node)])
}

#[test]
fn invalid_graphs_are_rejected_with_the_node() {
    let x = || GraphArg::node("logprobs");
    let placeholder = || GraphNode::placeholder("logprobs");
    let sum = || call("sum", vec![]);
    for (inputs, nodes, want) in [
        (vec![], vec![], "first input must be `logprobs`"),
        (logprobs(0), vec![], "rank 1 or 2"),
        (logprobs(1), vec![], "last node must be the output"),
        (logprobs(1), vec![output_of("logprobs")], "must have a placeholder"),
        (logprobs(1), vec![placeholder(), output_of("y")], "not an earlier node"),
        (logprobs(1), vec![GraphNode::placeholder("x"), output_of("x")], "expected \"logprobs\""),
        (logprobs(1), vec![sum(), output_of("y")], "precedes the placeholder"),
        (
            logprobs(1),
            vec![placeholder(), GraphNode::placeholder("b"), output_of("b")],
            "undeclared input \"b\"",
        ),
        (
            logprobs(1),
            vec![placeholder(), call("item", vec![]), output_of("y")],
            "\"item\" is not supported",
        ),
        (
            logprobs(1),
            vec![placeholder(), call("relu_", vec![]), output_of("y")],
            "would modify the input",
        ),
        (
            logprobs(1),
            vec![placeholder(), sum(), sum(), output_of("y")],
            "another node has the same name",
        ),
        (
            logprobs(1),
            vec![placeholder(), GraphNode { args: vec![x()], ..output_of("y") }],
            "pair of the loss",
        ),
        (
            logprobs(1),
            vec![placeholder(), GraphNode::output(x(), [("loss", x())])],
            "metric name \"loss\"",
        ),
        (
            logprobs(1),
            vec![
                placeholder(),
                call("sum", vec![serde_json::from_str(r#"{"odd form":1}"#).unwrap()]),
                output_of("y"),
            ],
            "odd form",
        ),
    ] {
        let error = LossProgram::new(inputs, LossGraph::new(nodes)).unwrap_err();
        assert!(matches!(error, Error::Graph { .. }));
        assert!(error.to_string().contains(want), "{error} instead of {want}");
    }
    let format = LossGraph { format: 2, nodes: vec![] };
    let error = LossProgram::new(logprobs(1), format).unwrap_err();
    assert!(error.to_string().contains("format 2"), "{error}");
    let deep = (0..40).fold(GraphArg::Int(1), |arg, _| GraphArg::List(vec![arg]));
    let error = program(vec![call("sum", vec![deep])]).unwrap_err();
    assert!(error.to_string().contains("32 levels deep"), "{error}");
}

#[test]
fn shape_errors_are_found_during_evaluation() {
    let up_to = |end: i64| GraphArg::slice(None, Some(end), None);
    let getitem = |index: GraphArg| {
        GraphNode::function("a", "operator.getitem", [GraphArg::node("logprobs"), index])
    };
    for (body, want) in [
        (vec![call("exp", vec![])], "expected a scalar"),
        (vec![call("sum", vec![GraphArg::Int(3)])], "dimension 3"),
        (vec![call("reshape", vec![GraphArg::Int(7)])], "do not fill"),
        (vec![call("sum", vec![]).kwarg("where", true)], "not supported"),
        (vec![call("exp", vec![GraphArg::Int(1)])], "too many"),
        (vec![call("mul", vec![GraphArg::from("a")])], "not a tensor"),
        (vec![getitem(GraphArg::Int(9))], "index 9 is out of range"),
        (vec![getitem(up_to(2)), call("mul", vec![GraphArg::node("a")])], "cannot be broadcast"),
        (vec![call("expand", vec![GraphArg::Int(1 << 40), GraphArg::Int(3)])], "too large"),
        (
            vec![call("long", vec![]), GraphNode::method("z", "mean", [GraphArg::node("y")])],
            "floats",
        ),
    ] {
        let error = run(body, &[-1.0, -2.0, -3.0]).unwrap_err();
        assert!(matches!(error, Error::Graph { node: Some(_), .. }), "{error}");
        assert!(error.to_string().contains(want), "{error} instead of {want}");
    }
}

#[test]
fn results_that_are_not_finite_are_errors() {
    let error = run(vec![call("log", vec![]), sum_of("y")], &[-1.0]).unwrap_err();
    assert!(matches!(error, Error::NonFiniteResult { what: "value", .. }), "{error}");
    let error = run(vec![call("sqrt", vec![]), sum_of("y")], &[0.0]).unwrap_err();
    assert!(matches!(error, Error::NonFiniteResult { what: "gradient", .. }), "{error}");
    assert!(error.is_numeric());
}

#[test]
fn constant_losses_have_a_gradient_of_zero() {
    let result = run(vec![call("numel", vec![])], &[-1.0, -2.0]).unwrap();
    assert_eq!((result.loss, &result.gradient[..]), (2.0, &[0.0, 0.0][..]));
}

#[test]
fn inputs_must_have_their_declared_rank_and_length() {
    let program = program(vec![call("sum", vec![])]).unwrap();
    let evaluate =
        |shape: &[usize], values: &[f32]| program.evaluate(&[TensorView::f32(shape, values)]);
    assert!(matches!(program.evaluate(&[]), Err(Error::InputCount { .. })));
    assert!(matches!(evaluate(&[1, 2], &[0.0; 2]), Err(Error::InputRank { .. })));
    assert!(matches!(evaluate(&[3], &[0.0; 2]), Err(Error::InputLength { .. })));
    assert_eq!(evaluate(&[0], &[]).unwrap().loss, 0.0);
}

/// The memory of the gradient of a concatenation is proportional to its result, not to the number
/// of its parts times the result.
#[test]
fn many_parts_can_be_concatenated() {
    let parts = GraphArg::List(vec![GraphArg::node("logprobs"); 20_000]);
    let body = vec![GraphNode::function("y", "torch.cat", [parts]), sum_of("y")];
    let result = run(body, &[-1.0; 64]).unwrap();
    assert_eq!((result.loss, result.gradient), (-1_280_000.0, vec![20_000.0; 64]));
}
