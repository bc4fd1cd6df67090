"""Rollouts as frameworks keep them, read as records: a text, a number or an array of a sample each.

    {N}.jsonl                     verl's trainer.rollout_data_dir and validation_data_dir
    {N}/gen_batch.dp              verl's skip.rollout: a pickled DataProto
    {N}/{i}/tq_batch.pt           verl's skip.rollout_tq: a saved TensorDict
    *.pt                          slime's --save-debug-rollout-data

Pickles are read as data and never loaded (:mod:`rlprobe.dumps.tensors.pickled`).
"""
