//! Traced losses against `fixtures/semantics/custom_graphs.json`, and every operation against torch.

use std::collections::BTreeMap;

use serde_json::Value;
use tinkex_engine::Error;
use tinkex_engine::loss::graph::{
    Arg, Graph, GraphEvaluated, GraphInput, Node, Op, Tensor, Values,
};

use crate::fixtures::{close, floats, number, numbers, semantics, shape, wide};
use crate::golden;

fn arg(value: &Value) -> Arg {
    match value {
        Value::Null => Arg::None,
        Value::Bool(yes) => Arg::Bool(*yes),
        Value::Number(n) => match n.as_i64() {
            Some(whole) => Arg::Int(whole),
            None => Arg::Float(n.as_f64().unwrap()),
        },
        Value::String(text) => Arg::Text(text.clone()),
        Value::Array(items) => Arg::List(items.iter().map(arg).collect()),
        Value::Object(object) => {
            let (key, value) = object.iter().next().unwrap();
            let items = || value.as_array().unwrap().iter().map(arg).collect::<Vec<_>>();
            match key.as_str() {
                "ref" => Arg::node(value.as_str().unwrap()),
                "tuple" => Arg::Tuple(items()),
                "dict" => {
                    let entries = value.as_object().unwrap().iter();
                    Arg::Dict(entries.map(|(key, value)| (key.clone(), arg(value))).collect())
                }
                "slice" => Arg::Slice(Box::new(items().try_into().unwrap())),
                "ellipsis" => Arg::Ellipsis,
                "dtype" => Arg::DType(value.as_str().unwrap().to_owned()),
                "float" => Arg::Float(number(value)),
                _ => Arg::Place(key.clone()),
            }
        }
    }
}

pub(crate) fn nodes(value: &Value) -> Vec<Node> {
    let nodes = value.as_array().unwrap().iter();
    nodes
        .map(|node| Node {
            op: match node["op"].as_str().unwrap() {
                "placeholder" => Op::Placeholder,
                "call_function" => Op::CallFunction,
                "call_method" => Op::CallMethod,
                "output" => Op::Output,
                _ => Op::Other,
            },
            name: node["name"].as_str().unwrap().to_owned(),
            target: node["target"].as_str().unwrap().to_owned(),
            args: node["args"].as_array().unwrap().iter().map(arg).collect(),
            kwargs: node["kwargs"]
                .as_object()
                .unwrap()
                .iter()
                .map(|(key, value)| (key.clone(), arg(value)))
                .collect(),
        })
        .collect()
}

#[test]
fn every_traced_case_has_its_loss_metrics_and_slope() {
    let fixture = semantics("custom_graphs.json");
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let inputs: Vec<GraphInput> = case["inputs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|input| GraphInput {
                name: input["name"].as_str().unwrap().to_owned(),
                rank: usize::try_from(input["rank"].as_u64().unwrap()).unwrap(),
            })
            .collect();
        let graph = Graph::new(inputs, nodes(&case["graph"]["nodes"])).unwrap();
        let (mut total, mut metrics) = (0.0, BTreeMap::<String, Vec<f64>>::new());
        for (i, datum) in case["data"].as_array().unwrap().iter().enumerate() {
            let lists: Vec<(Vec<usize>, Vec<f32>)> = graph
                .inputs()
                .iter()
                .map(|input| (shape(&datum[&input.name]), floats(&datum[&input.name])))
                .collect();
            let tensors: Vec<Tensor<'_>> = lists
                .iter()
                .map(|(shape, list)| Tensor { shape, values: Values::F32(list) })
                .collect();
            let out = graph.evaluate(&tensors).unwrap();
            total += out.loss;
            for (key, value) in out.metrics {
                metrics.entry(key).or_default().push(value);
            }
            let want = numbers(&case["expect"]["grad_logprobs"][i]);
            close(name, &wide(&out.slope), &want, 2e-6, 2e-6);
        }
        close(name, &[total], &[number(&case["expect"]["loss_sum"])], 2e-6, 2e-6);
        for (key, want) in case["expect"]["metrics"].as_object().unwrap() {
            let all = &metrics[key];
            let sum: f64 = all.iter().sum();
            let got = if key.ends_with(":mean") { sum / all.len() as f64 } else { sum };
            close(key, &[got], &[number(want)], 2e-6, 2e-6);
        }
    }
}

/// Values, slopes, kinks and ties of every operation, as torch computes them.
#[test]
fn every_operation_agrees_with_torch() {
    let path = golden::folder("graphs.json");
    let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for (number_of, case) in cases.as_array().unwrap().iter().enumerate() {
        let text = case["nodes"].to_string();
        let rank = shape(&case["logprobs"]).len();
        let ranks = [("logprobs", rank), ("w", rank), ("m", rank), ("i", 1)];
        let inputs = ranks.map(|(name, rank)| GraphInput { name: name.to_owned(), rank });
        let graph = Graph::new(inputs.to_vec(), nodes(&case["nodes"]));
        let graph = graph.unwrap_or_else(|error| panic!("case {number_of}: {error}\n{text}"));
        let (x, w) = (floats(&case["logprobs"]), floats(&case["w"]));
        #[expect(clippy::cast_possible_truncation, reason = "small whole numbers")]
        let whole = |key: &str| numbers(&case[key]).iter().map(|&n| n as i64).collect::<Vec<_>>();
        let (m, i) = (whole("m"), whole("i"));
        let sides = shape(&case["logprobs"]);
        let out = graph.evaluate(&[
            Tensor { shape: &sides, values: Values::F32(&x) },
            Tensor { shape: &sides, values: Values::F32(&w) },
            Tensor { shape: &sides, values: Values::I64(&m) },
            Tensor { shape: &[3], values: Values::I64(&i) },
        ]);
        let out = out.unwrap_or_else(|error| panic!("case {number_of}: {error}\n{text}"));
        let what = format!("case {number_of}: {text}");
        close(&what, &[out.loss], &[number(&case["loss"])], 1e-6, 1e-6);
        close(&what, &wide(&out.slope), &numbers(&case["grad"]), 1e-6, 1e-6);
    }
}

fn logprobs(rank: usize) -> Vec<GraphInput> {
    vec![GraphInput { name: "logprobs".to_owned(), rank }]
}

fn returns(node: &str) -> Node {
    Node::output(Arg::Tuple(vec![Arg::node(node), Arg::Dict(vec![])]))
}

/// `logprobs`, then these nodes; the last one is the loss.
fn graph(mut body: Vec<Node>) -> Result<Graph, Error> {
    let last = body.last().map_or("logprobs".to_owned(), |node| node.name.clone());
    body.insert(0, Node::placeholder("logprobs"));
    body.push(returns(&last));
    Graph::new(logprobs(1), body)
}

fn run(body: Vec<Node>, x: &[f32]) -> Result<GraphEvaluated, Error> {
    graph(body)?.evaluate(&[Tensor { shape: &[x.len()], values: Values::F32(x) }])
}

fn on(target: &str, args: Vec<Arg>) -> Node {
    let args = [vec![Arg::node("logprobs")], args].concat();
    Node::method("y", target, args)
}

#[test]
fn graphs_that_are_not_losses_are_refused_with_the_node() {
    let sum = || on("sum", vec![]);
    let x = || Arg::node("logprobs");
    for (inputs, nodes, want) in [
        (vec![], vec![], "first input must be logprobs"),
        (logprobs(0), vec![], "rank 1 or 2"),
        (logprobs(1), vec![], "last node must be the output"),
        (logprobs(1), vec![returns("logprobs")], "read by a placeholder"),
        (logprobs(1), vec![Node::placeholder("logprobs"), returns("y")], "no earlier node"),
        (logprobs(1), vec![Node::placeholder("x"), returns("x")], "where \"logprobs\" is due"),
        (logprobs(1), vec![sum(), returns("y")], "comes before input"),
        (
            logprobs(1),
            vec![Node::placeholder("logprobs"), Node::placeholder("b"), returns("b")],
            "more inputs than declared",
        ),
        (
            logprobs(1),
            vec![Node::placeholder("logprobs"), on("item", vec![]), returns("y")],
            "\"item\" may not be used",
        ),
        (
            logprobs(1),
            vec![Node::placeholder("logprobs"), on("relu_", vec![]), returns("y")],
            "would change the input",
        ),
        (
            logprobs(1),
            vec![Node::placeholder("logprobs"), sum(), sum(), returns("y")],
            "is there twice",
        ),
        (logprobs(1), vec![Node::placeholder("logprobs"), Node::output(x())], "pair of the loss"),
        (
            logprobs(1),
            vec![
                Node::placeholder("logprobs"),
                Node::output(Arg::Tuple(vec![x(), Arg::Dict(vec![("loss".to_owned(), x())])])),
            ],
            "metric \"loss\"",
        ),
    ] {
        let error = Graph::new(inputs, nodes).unwrap_err();
        assert!(matches!(error, Error::Graph { .. }));
        assert!(error.to_string().contains(want), "{error} instead of {want}");
    }
    let deep = (0..40).fold(Arg::Int(1), |arg, _| Arg::List(vec![arg]));
    assert!(graph(vec![on("sum", vec![deep])]).unwrap_err().to_string().contains("deeper"));
}

#[test]
fn faults_of_shape_are_found_when_run() {
    let index = |end: i64| Arg::Slice(Box::new([Arg::None, Arg::Int(end), Arg::None]));
    for (body, want) in [
        (vec![on("exp", vec![])], "one number is to be returned"),
        (vec![on("sum", vec![Arg::Int(3)])], "dimension 3"),
        (vec![on("reshape", vec![Arg::Int(7)])], "do not fill"),
        (vec![on("sum", vec![]).kwarg("where", Arg::Bool(true))], "not supported"),
        (vec![on("exp", vec![Arg::Int(1)])], "too many"),
        (vec![on("mul", vec![Arg::Text("a".to_owned())])], "not a tensor"),
        (
            vec![Node::function("y", "operator.getitem", vec![Arg::node("logprobs"), Arg::Int(9)])],
            "dimension 9",
        ),
        (
            vec![
                Node::function("a", "operator.getitem", vec![Arg::node("logprobs"), index(2)]),
                on("mul", vec![Arg::node("a")]),
            ],
            "do not fit together",
        ),
        (vec![on("expand", vec![Arg::Int(1 << 40), Arg::Int(3)])], "too large"),
        (vec![on("long", vec![]), Node::method("z", "mean", vec![Arg::node("y")])], "floats"),
    ] {
        let error = run(body, &[-1.0, -2.0, -3.0]).unwrap_err();
        assert!(matches!(error, Error::Graph { .. }), "{error}");
        assert!(error.to_string().contains(want), "{error} instead of {want}");
    }
}

#[test]
fn a_short_graph_cannot_ask_for_a_long_memory() {
    // Each step alone would be allowed.
    let stretched = || vec![Arg::Int(1 << 18), Arg::Int(64)];
    let body = vec![
        Node::method("a", "expand", [vec![Arg::node("logprobs")], stretched()].concat()),
        Node::method("b", "expand", [vec![Arg::node("logprobs")], stretched()].concat()),
        Node::method("loss", "sum", vec![Arg::node("b")]),
    ];
    let error = run(body, &[-1.0; 64]).unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
}

#[test]
fn a_loss_that_is_no_number_is_an_error() {
    let log = || vec![on("log", vec![]), Node::method("z", "sum", vec![Arg::node("y")])];
    let error = run(log(), &[-1.0]).unwrap_err();
    assert!(matches!(error, Error::NonFiniteResult { .. }), "{error}");
    let sqrt = vec![on("sqrt", vec![]), Node::method("z", "sum", vec![Arg::node("y")])];
    let error = run(sqrt, &[0.0]).unwrap_err();
    assert!(error.to_string().contains("gradient"), "{error}");
}

#[test]
fn a_slope_of_zero_wins_over_an_infinite_one() {
    let x = || Arg::node("logprobs");
    let body = vec![
        Node::function("mask", "operator.lt", vec![x(), Arg::Int(0)]),
        Node::function("root", "torch.sqrt", vec![Arg::node("y")]),
        Node::function("w", "torch.where", vec![Arg::node("mask"), Arg::node("root"), x()]),
        Node::method("z", "sum", vec![Arg::node("w")]),
    ];
    let body = [vec![on("abs", vec![])], body].concat();
    let out = run(body, &[-4.0, 0.0]).unwrap();
    assert_eq!((out.loss, &out.slope[..]), (2.0, &[-0.25, 1.0][..]));
}

/// Torch changed its mind about this; ours is what built-in losses do.
#[test]
fn clamp_passes_on_its_bounds() {
    let clamp = on("clamp", vec![Arg::Int(-2), Arg::Int(-1)]);
    let out = run(vec![clamp, Node::method("z", "sum", vec![Arg::node("y")])], &[-2.0, -1.0, -3.0]);
    assert_eq!(out.unwrap().slope, [1.0, 1.0, 0.0]);
}

#[test]
fn a_constant_loss_has_no_slope() {
    let body = vec![on("numel", vec![])];
    let out = run(body, &[-1.0, -2.0]).unwrap();
    assert_eq!((out.loss, &out.slope[..]), (2.0, &[0.0, 0.0][..]));
}

#[test]
fn inputs_must_be_as_declared() {
    let graph = graph(vec![on("sum", vec![])]).unwrap();
    let tensor = |shape, list| Tensor { shape, values: Values::F32(list) };
    assert!(matches!(graph.evaluate(&[]), Err(Error::Length { .. })));
    assert!(matches!(graph.evaluate(&[tensor(&[1, 2], &[0.0; 2])]), Err(Error::Shape { .. })));
    assert!(matches!(graph.evaluate(&[tensor(&[3], &[0.0; 2])]), Err(Error::Length { .. })));
    assert_eq!(graph.evaluate(&[tensor(&[0], &[])]).unwrap().loss, 0.0);
}
