"""Where each tensor of the model lies in the canonical vector, without building the model.

Without torch: the daemon holds the outer state, and needs no more of the model than this. A test
compares it with the module's own names and shapes (node.island.model).
"""

from collections.abc import Iterator

from node.island.mesh_shape import VOCABULARY
from node.outer_state import Layout, NamedShape, num_elements_of
from protocol.run_spec import ModelSection

_LAYERS = "model.layers."


def model_shapes(spec: ModelSection) -> list[NamedShape]:
    """Names and shapes in the module's own order, without building it."""
    return list(_shapes(spec))


def _shapes(spec: ModelSection) -> Iterator[NamedShape]:
    hidden = spec.hidden_size
    kv_size = hidden // spec.num_heads * spec.num_kv_heads
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv_size, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv_size, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (spec.ffn_size, hidden)
        yield f"{layer}.mlp.up_proj.weight", (spec.ffn_size, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, spec.ffn_size)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not spec.tie_embeddings:
        yield "lm_head.weight", (VOCABULARY, hidden)


def layout_of(spec: ModelSection, num_fragments: int = 1) -> Layout:
    """Where each tensor lies in the canonical vector: fragment by fragment, each in module order.

    Strided (Streaming DiLoCo, Douillard et al. 2025, section 2.1): fragment k of F holds layers
    k, k + F, …, so that every round touches the model in all depths. Embedding, head and last norm
    go, the largest first, to the fragment that is smallest by then.
    """
    shapes = model_shapes(spec)
    sizes = [0] * num_fragments
    fragment_of: dict[str, int] = {}
    outside_layers = []
    for name, shape in shapes:
        if name.startswith(_LAYERS):
            layer = int(name.removeprefix(_LAYERS).partition(".")[0])
            fragment_of[name] = layer % num_fragments
            sizes[layer % num_fragments] += num_elements_of(shape)
        else:
            outside_layers.append((name, num_elements_of(shape)))
    for name, num_elements in sorted(outside_layers, key=lambda named: named[1], reverse=True):
        smallest = sizes.index(min(sizes))
        fragment_of[name] = smallest
        sizes[smallest] += num_elements
    return Layout.of(
        *(
            [(name, shape) for name, shape in shapes if fragment_of[name] == index]
            for index in range(num_fragments)
        )
    )
