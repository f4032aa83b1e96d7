//! Random graphs: the interpreter may reject them, but must not panic.

use proptest::prelude::*;
use tinkex_autodiff::{GraphArg, GraphInput, GraphNode, LossGraph, LossProgram, TensorView};

/// Operations and one letter for the kind of each argument: `x` a tensor, `d` a dimension, `n` a
/// number, `i` an index, `l` a list of tensors, `s` sizes, `b` a boolean, `m` a tensor that the
/// operation uses as a mask.
const CALLS: [(&str, &str); 78] = [
    ("torch.abs", "x"),
    ("torch.exp", "x"),
    ("torch.log1p", "x"),
    ("sqrt", "x"),
    ("square", "x"),
    ("sign", "x"),
    ("sigmoid", "x"),
    ("tanh", "x"),
    ("relu", "x"),
    ("torch.isnan", "x"),
    ("operator.neg", "x"),
    ("operator.invert", "m"),
    ("torch._C._nn.softplus", "x"),
    ("logsigmoid", "x"),
    ("nan_to_num", "x"),
    ("clamp", "xnn"),
    ("clamp_", "xn"),
    ("torch.clip", "xxx"),
    ("operator.add", "xx"),
    ("operator.sub", "nx"),
    ("operator.mul", "xx"),
    ("operator.truediv", "xx"),
    ("operator.floordiv", "xn"),
    ("operator.mod", "xn"),
    ("operator.pow", "xn"),
    ("operator.gt", "xn"),
    ("operator.le", "xx"),
    ("operator.and_", "mm"),
    ("minimum", "xx"),
    ("torch.maximum", "xx"),
    ("logaddexp", "xx"),
    ("torch.where", "mxx"),
    ("where", "xmx"),
    ("masked_fill", "xmn"),
    ("sum", "x"),
    ("sum", "xd"),
    ("sum", "xdb"),
    ("mean", "xdb"),
    ("prod", "x"),
    ("prod", "xdb"),
    ("amax", "xdb"),
    ("max", "x"),
    ("max", "xd"),
    ("min", "xdb"),
    ("max", "xx"),
    ("var", "x"),
    ("std", "xdb"),
    ("norm", "xn"),
    ("norm", "xnd"),
    ("logsumexp", "xdb"),
    ("softmax", "xd"),
    ("log_softmax", "xd"),
    ("cumsum", "xd"),
    ("any", "xd"),
    ("all", "x"),
    ("torch.nn.functional.mse_loss", "xx"),
    ("torch.nn.functional.huber_loss", "xx"),
    ("reshape", "xs"),
    ("view", "xd"),
    ("flatten", "xdd"),
    ("squeeze", "xd"),
    ("unsqueeze", "xd"),
    ("transpose", "xdd"),
    ("permute", "xdd"),
    ("t", "x"),
    ("expand", "xs"),
    ("expand_as", "xx"),
    ("torch.stack", "ld"),
    ("torch.cat", "ld"),
    ("flip", "xd"),
    ("roll", "xdd"),
    ("gather", "xdx"),
    ("index_select", "xdx"),
    ("operator.getitem", "xi"),
    ("long", "x"),
    ("detach", "x"),
    ("operator.matmul", "xx"),
    ("size", "xd"),
];

/// Shapes of both inputs.
const SHAPES: [&[usize]; 7] = [&[0], &[1], &[5], &[2, 3], &[0, 3], &[3, 0], &[1, 1]];

fn tensor(nodes: usize) -> impl Strategy<Value = GraphArg> {
    (0..nodes).prop_map(|i| GraphArg::Ref(name(i)))
}

fn integer() -> impl Strategy<Value = i64> {
    let extreme = vec![i64::MIN, i64::MAX, 1 << 40, -(1 << 40), 1 << 20];
    prop_oneof![40 => -2_i64..4, 1 => prop::sample::select(extreme)]
}

fn number() -> impl Strategy<Value = GraphArg> {
    prop_oneof![
        4 => (-2.0..2.0).prop_map(GraphArg::Float),
        2 => integer().prop_map(GraphArg::Int),
        1 => any::<f64>().prop_map(GraphArg::Float),
    ]
}

fn index(nodes: usize) -> impl Strategy<Value = GraphArg> {
    let slice = prop::array::uniform3(prop::option::of(integer()))
        .prop_map(|[start, stop, step]| GraphArg::slice(start, stop, step));
    let one = prop_oneof![
        4 => slice,
        4 => integer().prop_map(GraphArg::Int),
        1 => Just(GraphArg::None),
        1 => Just(GraphArg::Ellipsis),
        1 => tensor(nodes),
    ];
    prop_oneof![one.clone(), prop::collection::vec(one, 0..4).prop_map(GraphArg::Tuple)]
}

/// Generates an argument of this kind, or with probability 1/31 of any kind.
fn arg(kind: char, nodes: usize) -> BoxedStrategy<GraphArg> {
    let matching = match kind {
        'd' => (-2_i64..3).prop_map(GraphArg::Int).boxed(),
        'n' => number().boxed(),
        'i' => index(nodes).boxed(),
        'b' => any::<bool>().prop_map(GraphArg::Bool).boxed(),
        'l' => prop::collection::vec(tensor(nodes), 0..4).prop_map(GraphArg::List).boxed(),
        's' => prop::collection::vec(integer().prop_map(GraphArg::Int), 0..4)
            .prop_map(GraphArg::List)
            .boxed(),
        _ => tensor(nodes).boxed(),
    };
    let other = prop_oneof![tensor(nodes), number(), index(nodes), Just(GraphArg::None)];
    prop_oneof![30 => matching, 1 => other].boxed()
}

/// Returns the name of node `i`. Nodes 0 and 1 are the inputs.
fn name(i: usize) -> String {
    ["logprobs", "w"].get(i).map_or_else(|| format!("n{i}"), |name| (*name).to_owned())
}

fn node(i: usize) -> impl Strategy<Value = GraphNode> {
    prop::sample::select(&CALLS[..]).prop_flat_map(move |(target, kinds)| {
        let args: Vec<_> = kinds.chars().map(|kind| arg(kind, i)).collect();
        args.prop_map(move |args| {
            if target.contains('.') {
                GraphNode::function(&name(i), target, args)
            } else {
                GraphNode::method(&name(i), target, args)
            }
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn random_graphs_never_panic(
        body in (node(2), node(3), node(4), node(5)),
        shape in prop::sample::select(&SHAPES[..]),
        ints in any::<bool>(),
    ) {
        let (a, b, c, d) = body;
        let inputs = [GraphNode::placeholder("logprobs"), GraphNode::placeholder("w")];
        let mut nodes: Vec<GraphNode> = inputs.into_iter().chain([a, b, c, d]).collect();
        nodes.push(GraphNode::method("loss", "sum", vec![GraphArg::Ref(name(5))]));
        nodes.push(GraphNode::output(GraphArg::node("loss"), []));
        let rank = u8::try_from(shape.len()).unwrap();
        let inputs = ["logprobs", "w"].map(|name| GraphInput::new(name, rank));
        if let Ok(program) = LossProgram::new(inputs.to_vec(), LossGraph::new(nodes)) {
            let count = shape.iter().product();
            let floats = vec![-0.5; count];
            let integers = vec![1_i64; count];
            let logprobs = TensorView::f32(shape, &floats);
            let other = if ints { TensorView::i64(shape, &integers) } else { logprobs };
            if let Ok(result) = program.evaluate(&[logprobs, other]) {
                prop_assert!(result.loss.is_finite());
                prop_assert_eq!(result.gradient.len(), count);
            }
        }
    }
}
