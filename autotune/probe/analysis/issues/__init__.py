"""What slows a training or endangers it, and is no knob. Records in, one `Issue` each out; pure."""
