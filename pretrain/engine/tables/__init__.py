"""Tables of memories in training: who adds up their gradients, what updates them, and where they lie.

A lookup's backward pass gives its rows and vectors to the table's gradient (`kernels.common.table_gradient.gradient_of`). A
table's share on a rank is updated by one rule (`pretrain.engine.update_rules`), which also says what checkpoints keep of it:

| keys of `optimizer`          | gradient, and who adds it up over replicas        | rule                                       |
| ---------------------------- | ------------------------------------------------- | ------------------------------------------ |
| none                         | dense fp32, Megatron's DDP                        | Megatron's distributed optimizer           |
| `value_offload: cpu`         | dense fp32, Megatron's DDP                        | `value_offload`, in host memory            |
| `tables: row_wise`           | dense fp32, Megatron's DDP                        | `row_wise`                                 |
| `table_gradient_dtype: bf16` | dense bf16, `bf16_gradients`                      | `row_wise`                                 |
| `table_gradients: rows`      | rows, `row_gradients` and `replica_rows`          | `read_rows`, on `row_wise`'s formula       |
| `table_folder`               | rows, of tables in files (`table_files`)          | `read_rows`, on what `stored_tables` fetch |
| `trained_rows`               | rows that `trained_rows` chooses by `read_counts` | `read_rows`                                |

`gradient_timing` says when a dense gradient is added to, `pipeline_copies` adds up those of a table that several stages read,
and `step_reads` says which rows a step reads before it runs.
"""
