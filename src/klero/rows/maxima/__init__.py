"""Block maxima: one read of the row that tells its largest key, where to look, and whether the row is sound.

block_maxima(row [V], maxima int32 [B]) fills the largest ordered key of each block of BLOCK tokens (tiny values already
+0) and returns (largest key of the row unflushed, largest raw bits as unsigned). NaN of either sign, +inf and -inf are
read off these two. Both results and `maxima` merge by maximum. Agreement of kernel and reference: *bits*.
"""
