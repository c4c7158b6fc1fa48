"""What a KV format or a sparsification level costs in quality: likelihoods, retrieval, tasks (docs/evaluation.md)."""
