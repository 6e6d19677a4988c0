// `props.value` is the record that was verified last, by the key of its text and schema.
watch("value", () => addVerified(props.value));
