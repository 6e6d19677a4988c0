// The growing answer of a long chat. Sending the whole history with every update would be slow, so only the text
// comes, and stands in for the last message until that is complete.
const show = () => {
  const text = props.value;
  const last = [...document.querySelectorAll("#chatbot .bot-row .message:not(.thought) .message-content")].at(-1);
  for (const node of document.querySelectorAll("#chatbot .live-text")) if (!text || !last?.contains(node)) node.remove();
  if (!text || !last) return;
  let node = last.querySelector(".live-text");
  if (!node) {
    node = document.createElement("div");
    node.className = "live-text";
    last.append(node);
  }
  node.textContent = text;
  const box = document.querySelector("#chatbot .bubble-wrap");
  if (box && box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
};
watch("value", show);
