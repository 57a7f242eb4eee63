"""The pure model: ids, documents, the decision log's rules, closure. It performs no I/O."""
