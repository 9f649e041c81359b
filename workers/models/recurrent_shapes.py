"""The sizes and constants of recurrent mixers, one class for each kind. Plain data; imports no framework.

Ranks split heads. `share` returns one rank's part, which the mixers of `workers/decoders/mixers/` compute with.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator

import msgspec


class RecurrentKind(enum.Enum):
    """A kind of recurrent mixer: the name of its module in `workers/decoders/mixers/`."""

    GATED_DELTA = "gated_delta"
    KIMI_DELTA = "kimi_delta"
    STATE_SPACE = "state_space"
    SELECTIVE_SCAN = "selective_scan"
    LIGHTNING = "lightning"
    MATRIX_MEMORY = "matrix_memory"
    RG_LRU = "rg_lru"
    TIME_MIXING = "time_mixing"
    CHANNEL_MIXING = "channel_mixing"
    """The part beside time mixing, in its module."""
    CONVOLVED_ATTENTION = "convolved_attention"
    """Attention behind convolutions, which `workers/decoders/convolved_attention.py` computes, with keys and values."""


class StateShape(msgspec.Struct, frozen=True):
    """The recurrent state of one sequence in one layer: float32 tensors, which do not grow with the sequence."""

    tensors: tuple[tuple[int, ...], ...]
    """The shape of each tensor. Ranks split the first dimension: channels or heads."""
    kept_whole: tuple[int, ...] = ()
    """The number of entries of each first dimension that every rank has, such as channels of groups that all heads
    share; if empty, none.
    """

    @property
    def num_bytes(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.tensors)

    def can_split(self, num_ranks: int) -> bool:
        return all((shape[0] - kept) % num_ranks == 0 for shape, kept in self._split_sizes())

    def share(self, num_ranks: int) -> StateShape:
        """Returns the part of one rank."""
        shapes = tuple(((shape[0] - kept) // num_ranks + kept, *shape[1:]) for shape, kept in self._split_sizes())
        return StateShape(shapes, self.kept_whole)

    def _split_sizes(self) -> Iterator[tuple[tuple[int, ...], int]]:
        return zip(self.tensors, self.kept_whole or (0,) * len(self.tensors), strict=True)


class DeltaShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gated delta nets (Yang et al., 2024) and Kimi's delta attention (Kimi Team, 2025)."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of the key heads: neighbouring value heads share a query and a key."""
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution of queries, keys and values sees."""
    norm_eps: float
    beta_scale: float = 1.0
    """Factor on the rates of the delta rule; with 2 a state may change its sign (Grazzi et al., 2025)."""
    least_log_decay: float = 0.0
    """Bound of the logarithms of decays, which are this number times sigmoids (Ling 3); 0 for softplus without a bound.
    """
    has_sigmoid_gates: bool = False
    """Whether sigmoids of gated delta nets' gates multiply their results, instead of SiLU (Qwen4-Exp)."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values of all heads."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def state(self) -> StateShape:
        """The window of the convolution and the states of the heads."""
        channels = sum(self.sizes) // self.num_key_heads
        window = (self.num_key_heads, channels, self.width - 1)
        return StateShape((window, (self.num_value_heads, self.key_dim, self.value_dim)))

    def share(self, num_ranks: int) -> DeltaShape:
        return msgspec.structs.replace(
            self,
            num_key_heads=self.num_key_heads // num_ranks,
            num_value_heads=self.num_value_heads // num_ranks,
        )


class StateSpaceShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Mamba 2 (Dao and Gu, 2024)."""

    num_groups: int
    """Groups of heads that share B and C. Ranks split them, except a single one, which every rank has."""
    num_heads: int
    state_size: int
    head_dim: int
    width: int
    """Tokens that the convolution of x, B and C sees."""
    norm_eps: float | None
    """The constant in the norm of each group's results; None for no norm."""
    norms_before_gate: bool = False
    """Whether the norm comes before the gate instead of after it."""
    step_limits: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the time steps."""
    shares_group: bool = False
    """Whether this is one rank's share of the only group."""
    has_kernel_bias: bool = True
    """Whether the convolution has a bias."""
    has_input_bias: bool = False
    has_output_bias: bool = False

    @property
    def inner(self) -> int:
        """The width of x and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> StateShape:
        """The windows of the convolutions of x and of B and C, and the states of the heads."""
        return StateShape(
            (
                (self.num_heads, self.head_dim, self.width - 1),
                (self.num_groups, 2 * self.state_size, self.width - 1),
                (self.num_heads, self.state_size, self.head_dim),
            ),
            kept_whole=(0, 1 if self.num_groups == 1 else 0, 0),
        )

    def share(self, num_ranks: int) -> StateSpaceShape:
        return msgspec.structs.replace(
            self,
            num_groups=max(1, self.num_groups // num_ranks),
            num_heads=self.num_heads // num_ranks,
            shares_group=self.num_groups == 1 and num_ranks > 1,
        )


class SelectiveShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Mamba 1 (Gu and Dao, 2023): each channel has a state and a time step of its own."""

    channels: int
    state_size: int
    step_rank: int
    """The width of the vector of which all channels' time steps are products."""
    width: int
    norm_eps: float | None
    """The constant in the norms of time steps, B and C; None for no norms."""
    has_kernel_bias: bool = True
    """Whether the convolution has a bias."""
    has_bias: bool = False
    """Whether the linears from and to the hidden state have biases."""
    num_heads: int = 1
    """Equal parts of the channels, each of which makes time steps, B and C of its own (Zamba)."""

    def of_head(self, linear: str, head: int) -> str:
        """Returns the name of a head's linear `selection` or `time` among the inputs of the mixer."""
        return linear if self.num_heads == 1 else f"{linear} {head}"

    @property
    def selected(self) -> int:
        """The width of time steps, B and C together, which are products of all channels."""
        return self.step_rank + 2 * self.state_size

    @property
    def state(self) -> StateShape:
        """The window of the convolution and the states of the channels."""
        return StateShape(((self.channels, self.width - 1), (self.channels, self.state_size, 1)))

    def share(self, num_ranks: int) -> SelectiveShape:
        return msgspec.structs.replace(self, channels=self.channels // num_ranks)


class LightningShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Lightning attention (MiniMax, 2025)."""

    num_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    """The constant in the norm of the results of all heads together."""

    @property
    def state(self) -> StateShape:
        """The states of the heads."""
        return StateShape(((self.num_heads, self.head_dim, self.head_dim),))

    def share(self, num_ranks: int) -> LightningShape:
        return msgspec.structs.replace(self, num_heads=self.num_heads // num_ranks)


class MatrixMemoryShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The matrix memory of xLSTM (Beck et al., 2024)."""

    num_heads: int
    key_dim: int
    value_dim: int
    gate_cap: float
    """Soft bound of input and forget gates (`reference.cap`)."""
    norm_eps: float
    eps: float
    """The constant that is added to what outputs are divided by."""

    @property
    def state(self) -> StateShape:
        """The states of the heads with one more column, and the largest input gate so far."""
        return StateShape(((self.num_heads, self.key_dim, self.value_dim + 1), (self.num_heads, 1)))

    def share(self, num_ranks: int) -> MatrixMemoryShape:
        return msgspec.structs.replace(self, num_heads=self.num_heads // num_ranks)


class RgLruShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Real-gated linear recurrent units (Griffin; De et al., 2024)."""

    num_heads: int
    """Equal parts of the channels, each of which makes its gates of its own channels."""
    head_dim: int
    width: int
    """Tokens that the convolution sees."""

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def state(self) -> StateShape:
        """The window of the convolution and the states of the channels."""
        return StateShape(((self.num_heads, self.head_dim, self.width - 1), (self.channels, 1, 1)))

    def share(self, num_ranks: int) -> RgLruShape:
        return msgspec.structs.replace(self, num_heads=self.num_heads // num_ranks)


class ConvolvedShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Attention whose queries and keys go through two convolutions (CCA; Figliolia et al., 2025). No ranks split it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Number of first dimensions of each head that rotate."""
    first_width: int
    """Tokens that the convolution of each channel sees."""
    second_width: int
    """Results of the first convolution that the one over the channels of a head sees."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The widths of queries, of keys, and of the two halves of values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys // 2, keys // 2

    @property
    def state(self) -> StateShape:
        """The window of queries and keys, and the half of the values that the next token has."""
        window = (sum(self.sizes[:2]), self.first_width + self.second_width - 2)
        return StateShape((window, (self.sizes[3], 1)))

    def share(self, num_ranks: int) -> ConvolvedShape:
        return self


class RwkvShape(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """RWKV-4 (Peng et al., 2023)."""

    hidden_size: int
    channels: int
    """Channels of keys and values in time mixing."""
    halving_period: int
    """Blocks after which the residual stream is halved; 0 for never."""

    @property
    def state(self) -> StateShape:
        """The state of time mixing, which `workers/decoders/mixers/time_mixing.py` describes."""
        of_channels = (self.channels, 1)
        tensors = ((self.hidden_size, 1), (self.channels, 2, 1), of_channels, of_channels, (self.channels, 1, 2))
        return StateShape(tensors, kept_whole=(self.hidden_size, 0, 0, 0, 0))

    @property
    def window(self) -> StateShape:
        """The state of channel mixing: the last hidden state."""
        return StateShape(((self.hidden_size, 1),), kept_whole=(self.hidden_size,))

    def share(self, num_ranks: int) -> RwkvShape:
        return msgspec.structs.replace(self, channels=self.channels // num_ranks)


RecurrentShape = (
    DeltaShape
    | StateSpaceShape
    | SelectiveShape
    | LightningShape
    | MatrixMemoryShape
    | RgLruShape
    | ConvolvedShape
    | RwkvShape
)
