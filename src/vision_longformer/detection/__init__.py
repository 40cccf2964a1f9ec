"""Object detection and instance segmentation: RetinaNet and Mask R-CNN on our backbones."""
