"""What train_demo_model.py is made of: corpus, llama, training, distillation (read in this order)."""
