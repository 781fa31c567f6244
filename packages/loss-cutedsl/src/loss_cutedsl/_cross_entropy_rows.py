"""What the kernels of cross-entropy share: a row's logits, its target, its loss, and the gradient of its elements.

Prefixes: ``g_`` global address (Int64), ``s_`` shared-memory address (Int32). Sizes: R rows, V classes.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32, Int64

from ._device import (
    LN2,
    LOG2E,
    StagedRows,
    divide,
    exp2,
    fma,
    load_float_below,
    log2,
    moderate,
    ptx,
    select_below,
    tanh,
)

# Words that one warp hands to the others of its row: maximum, sum, two plain sums, and the argmax.
ENTRY_WORDS = 8


class RowFacts(NamedTuple):
    """What stays the same over the rows of one launch.

    The kernels work with values t = x / unit, whose powers are exp(x - m) = 2 ** ((t - max t) * power). ``inner`` is
    the factor of a logit before the softcap ``limit``. ``confidence``, ``share``: 1 - e and e / V. The columns are the
    classes from ``first_class`` on, of ``total_classes``: all of them, or one shard of the vocabulary.
    """

    cols: Int32
    chunks: Int32
    first: Int32
    thread: Int32
    rank: Int32
    s_scratch: Int32
    g_weight: Int64
    first_class: Int64
    total_classes: Int64
    z_loss: Float32
    confidence: Float32
    share: Float32
    inner: Float32
    limit: Float32
    unit: Float32
    power: Float32


class CrossEntropyRows(StagedRows):
    """What the kernels of cross-entropy share: a row's logits, loss, and gradient.

    ``logits``, a compile-time fact, is how a raw logit r becomes t: "linear" (positive scale s, no softcap: t = r and
    the scale is the unit), "scaled" (any scale: t = s r) or "softcap" (t = c tanh(s r / c)).
    """

    def row_facts(
        self, cols, chunks, first, thread, rank, s_scratch, g_weight, first_class, total_classes,
        label_smoothing, z_loss, logit_scale, softcap,
    ):  # fmt: skip
        linear = self.logits == "linear"
        return RowFacts(
            cols=cols,
            chunks=chunks,
            first=first,
            thread=thread,
            rank=rank,
            s_scratch=s_scratch,
            g_weight=g_weight,
            first_class=first_class,
            total_classes=total_classes,
            z_loss=z_loss,
            confidence=Float32(1.0) - label_smoothing,
            share=divide(label_smoothing, Float32(cols)) if self.smoothing else Float32(0.0),
            inner=divide(logit_scale, softcap) if self.logits == "softcap" else logit_scale,
            limit=softcap,
            unit=logit_scale if linear else Float32(1.0),
            power=logit_scale * Float32(LOG2E) if linear else Float32(LOG2E),
        )

    def value(self, facts, raw, col):
        """t of a raw logit; -inf for columns outside the row."""
        if self.logits == "linear":
            return raw
        t = raw * facts.inner
        if self.logits == "softcap":
            t = tanh(t) * facts.limit
        return select_below(col, facts.cols, t, Float32(float("-inf")))

    def slope(self, facts, raw):
        """The softcap's derivative at a raw logit, or None for 1."""
        if self.logits != "softcap":
            return None
        bounded = tanh(raw * facts.inner)
        return fma(Float32(0.0) - bounded, bounded, Float32(1.0))

    def row_loss(self, facts, target, y, x_y, w_y, highest, total, x_sum, w_sum):
        """Loss, its z-loss part, lse, and the factor of the probabilities in the gradient.

        In a shard of the vocabulary the loss is the target's negative logit, or 0 where another shard has it. A target
        that is no class gives NaN for loss and factor.
        """
        log_total = log2(total) * Float32(LN2)
        lse = fma(highest, facts.unit, log_total)
        push = facts.confidence * w_y
        if self.shard:
            loss = select_below(y, facts.cols, Float32(0.0) - self.value(facts, x_y, y) * facts.unit, Float32(0.0))
            return self.or_nan(facts, target, loss), Float32(0.0), lse, push
        loss = push * (log_total - (self.value(facts, x_y, y) - highest) * facts.unit)
        pull = push
        if self.smoothing:
            above = log_total - (self.anchor(facts, x_y, y) - highest) * facts.unit
            loss = fma(facts.share, fma(w_sum, above, Float32(0.0) - x_sum * facts.unit), loss)
            pull = fma(facts.share, w_sum, pull)
        z_part = facts.z_loss * lse * lse
        pull = fma(facts.z_loss * Float32(2.0), lse, pull)
        return self.or_nan(facts, target, loss + z_part), z_part, lse, self.or_nan(facts, target, pull)

    def anchor(self, facts, x_y, y):
        """What the sum of the row's t counts from, with smoothing: the target's t, where that goes.

        Far from zero, neither the sum of t nor V times the lse has the digits that their difference needs.
        """
        return moderate(self.value(facts, x_y, y)) if self.smoothing else Float32(0.0)

    def or_nan(self, facts, target, value):
        """``value``, or NaN where the target is no class."""
        return ptx(
            "{ .reg .pred p; setp.lt.u64 p, {$r0}, {$r1}; selp.f32 {$w0}, {$r2}, 0f7FC00000, p; }",
            [Float32],
            [target, facts.total_classes, value],
        )

    def gradient_values(self, facts, raw, col, highest, pull, scale):
        """Gradient of elements from column ``col`` on, without the target's own term."""
        values = []
        for lane in range(len(raw)):
            value = exp2((self.value(facts, raw[lane], col + lane) - highest) * facts.power)
            if self.smoothing:
                push = Float32(0.0) - facts.share * scale
                if self.weighted:
                    push = push * load_float_below(facts.g_weight + Int64(col + lane) * 4, col + lane, facts.cols)
                value = fma(value, pull, push)
            else:
                value = value * pull
            slope = self.slope(facts, raw[lane])
            values.append(value if slope is None else value * slope)
        return values

    def target_gradient(self, facts, y, x_y, w_y, g_out, out_phase, highest, pull, scale):
        """Store the target's gradient, formed in float32."""
        push = (facts.confidence + facts.share) * w_y if self.smoothing else facts.confidence * w_y
        value = exp2((self.value(facts, x_y, y) - highest) * facts.power) * pull - push * scale
        slope = self.slope(facts, x_y)
        if slope is not None:
            value = value * slope
        self.store_column(g_out, out_phase, y, value)

    def load_target(self, g_target, row, wanted, otherwise):
        """The target of a row, or ``otherwise`` where the row is not wanted."""
        bits = self.target_bits
        load = {64: "ld.global.b64 {$w0}, [{$r0}];", 32: "ld.global.s32 v, [{$r0}];", 8: "ld.global.u8 v, [{$r0}];"}[
            bits
        ]
        widen = {64: "", 32: "@p cvt.s64.s32 {$w0}, v;", 8: "@p cvt.u64.u32 {$w0}, v;"}[bits]
        return ptx(
            "{ .reg .pred p; .reg .b32 v; setp.ne.u32 p, {$r1}, 0; mov.b64 {$w0}, {$r2}; @p %s %s }" % (load, widen),
            [Int64],
            [g_target + Int64(row) * (bits // 8), Int32(wanted), otherwise],
        )

    def column(self, facts, target):
        """A target's column; ``cols`` if it has none, so that one unsigned comparison tells."""
        return ptx(
            "{ .reg .pred p; .reg .b64 b; .reg .b32 c; cvt.u64.u32 b, {$r1}; setp.lt.u64 p, {$r0}, b;"
            " cvt.u32.u64 c, {$r0}; selp.b32 {$w0}, c, {$r1}, p; }",
            [Int32],
            [target - facts.first_class, facts.cols],
        )

    def target_logit(self, g_vectors, phase, y, cols):
        """The raw logit of column y, or column 0's where y is no column."""
        inside = ptx("{ .reg .pred p; setp.lt.u32 p, {$r0}, {$r1}; selp.b32 {$w0}, {$r0}, 0, p; }", [Int32], [y, cols])
        return self.load_column(g_vectors, phase, inside)

    def target_weight(self, g_weight, y, cols):
        if not self.weighted:
            return Float32(1.0)
        return load_float_below(g_weight + Int64(y) * 4, y, cols)
