"""A row of logits as kernels read it: as it comes in (inputs), rewritten (view), its largest (maxima, select)."""
